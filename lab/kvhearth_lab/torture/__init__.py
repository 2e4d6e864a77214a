"""``kvhearth torture``: real daemons, clients and files under faults, with every answer compared.

The parent (``run``, ``world``) chooses the faults and records every promise of the daemon
(``oracle``). Clients are processes of their own (``client``). ``faults`` is a table of small
classes.
"""
