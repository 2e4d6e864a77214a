"""Parts of ``lab/gpu/run.py``, each the main of a process of its own."""
