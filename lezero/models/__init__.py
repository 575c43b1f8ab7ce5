"""Readable reference models and their plain generation."""
