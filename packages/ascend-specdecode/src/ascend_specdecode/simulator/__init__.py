"""Runs of the engine in virtual time, with costs of a hardware profile and seeded faults."""
