"""Rewrites of a traced step: one file each."""
