"""Buckets are as small as in the tests of fusion."""

from fusion.conftest import several_buckets

__all__ = ["several_buckets"]
