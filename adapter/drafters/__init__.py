"""The kinds of drafter, a file each, behind the small protocol of `protocol.py`."""
