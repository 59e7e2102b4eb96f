"""Agreeing on numbers with other peers, fragment by fragment."""
