"""Exact draft-verify speculative decoding for any target and drafter."""
