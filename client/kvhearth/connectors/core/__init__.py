"""The part of every connector that knows no engine: tokens, keys, pages, steps.

An adapter describes its engine in the words of ``engine``, gives the ``WorkerConnector`` of each
rank its pages, and carries the messages of ``step_metadata`` between it and ``SchedulerConnector``.
"""
