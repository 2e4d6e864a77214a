"""``kvhearth torture``: real daemons, clients and files under faults, and every answer compared.

The parent (``run``, ``world``) decides what goes wrong and keeps the books of what was promised
(``oracle``); clients are processes of their own (``worker``); ``faults`` is a table of small
classes.
"""
