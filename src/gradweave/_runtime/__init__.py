"""The mechanisms that all techniques share: each exists once, and knows no technique."""
