"""``python -m kvhearth_server``: the command ``kvhearth`` where no console script is installed."""

from kvhearth_server.cli.app import main

if __name__ == "__main__":
    main()
