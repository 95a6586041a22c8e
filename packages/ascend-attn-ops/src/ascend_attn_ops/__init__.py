"""Executable contracts, references and providers for CANN attention operators."""
