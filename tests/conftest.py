"""Puts tests/ on the path, for `helpers`."""
