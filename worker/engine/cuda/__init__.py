"""The engine for NVIDIA GPUs; imported by worker.engine.factory alone."""
