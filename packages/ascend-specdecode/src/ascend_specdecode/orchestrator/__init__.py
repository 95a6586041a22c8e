"""The engine: continuous batching of draft-verify steps under structured concurrency."""
