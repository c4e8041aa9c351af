"""Passes over a traced step."""
