#!/bin/sh
# Everything that the image holds. The Dockerfile's builder and rootfs.py both run this file, so what
# is tested without a container engine is what an image gets.
#
#   install.sh SOURCE IMAGE [PYTHON]
#
# SOURCE: a checkout (pyproject.toml, hatch_build.py, README.md, LICENSE, client, server,
# deploy/docker). IMAGE: a directory; IMAGE/root becomes the image's /, beside it is what the daemon
# writes to. PYTHON: what builds and, as /usr/local/bin/python3, what the image runs. A C compiler
# makes the native module; without one the image falls back to numpy.
#
# EXTRAS (environment): `server`, or `server,remote` for the client libraries of remote tiers, too
# (buckets and Valkey; Mooncake's needs libraries of its host).
set -eu
source=$1
image=$2
python=${3:-python3}
lock=requirements.lock
remote=
for extra in $(echo "${EXTRAS:-server}" | tr ',' ' '); do
  case $extra in
    server) ;;
    remote) lock=remote.lock remote=yes ;;
    *) echo "EXTRAS: $extra is unknown; write server or server,remote" >&2; exit 1 ;;
  esac
done
root=$image/root
target=$root/opt/kvhearth
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_CACHE_DIR=1

# Only files whose hashes `make update` wrote down.
locked() {
  "$python" -m pip --quiet --python "$1/bin/python3" install --no-compile --only-binary :all: \
    --require-hashes --no-deps --requirement "$source/deploy/docker/$2"
}

# The wheel: hatchling, in an environment of its own.
"$python" -m venv --without-pip "$work/build"
locked "$work/build" build.lock
"$python" -m pip --quiet --python "$work/build/bin/python3" wheel --no-deps --no-build-isolation \
  --wheel-dir "$work" "$source"
wheel=$(echo "$work"/kvhearth-*.whl)

# A virtual environment without pip: nothing in the image installs anything.
mkdir -p "$root/opt"
"$python" -m venv --without-pip --symlinks "$target"
locked "$target" "$lock"
"$python" -m pip --quiet --python "$target/bin/python3" install --no-compile --no-deps --no-index \
  "$wheel"
"$python" -m pip --quiet --python "$target/bin/python3" check

# Not needed to run: tests, stubs, headers, static libraries, numpy's Fortran compiler, and all C sources
# of the native module: with a part of them it would count as compiled from others.
find "$target/lib" -depth -type d \( -name tests -o -name include -o -path '*/numpy/f2py' -o -path '*/kvhearth/native/src' \) -exec rm -rf {} +
rm -f "$target"/bin/f2py "$target"/bin/numpy-config
# Help and tables show no source code: rich looks for the lexers of text and Python only.
find "$target"/lib/python3*/site-packages/pygments/lexers -name '*.py' ! -name __init__.py ! -name _mapping.py \
  ! -name special.py ! -name python.py -delete
find "$target/lib" -type f \( -name '*.pyi' -o -name '*.a' -o -name '*.pxd' -o -name '*.h' \) -delete

# It was made below IMAGE and will run at /opt/kvhearth.
rm -f "$target"/bin/python* "$target"/bin/activate* "$target"/bin/Activate*
ln -s /usr/local/bin/python3 "$target/bin/python3"
ln -s python3 "$target/bin/python"
echo 'home = /usr/local/bin
include-system-site-packages = false' > "$target/pyvenv.cfg"
for script in "$target"/bin/*; do
  if [ -f "$script" ] && [ ! -L "$script" ]; then
    sed -i '1s|^#!.*python.*|#!/opt/kvhearth/bin/python3|' "$script"
  fi
done

# In place of a distribution: the interpreter and what all of this loads.
"$python" "$source/deploy/docker/base.py" "$root"

# All that the daemon writes to: its sockets, and the place for a hugetlbfs or tmpfs of the host.
mkdir -p "$image/run/kvhearth" "$image/arena"
chmod 0755 "$image/run/kvhearth"
chmod 0700 "$image/arena"
