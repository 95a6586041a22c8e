"""What `tools/smollm2.py` and `tools/demo.py` are made of; not part of any published package."""
