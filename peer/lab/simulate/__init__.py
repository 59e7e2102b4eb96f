"""Experiments in virtual time: what the method promises, checked before anybody lends a machine."""
