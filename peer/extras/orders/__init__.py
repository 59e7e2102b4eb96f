"""The commands of the owner of a run; that peers obey is part of the core.

``owning`` has the commands about people (invite, run sign, run delegate, run ban), ``directing``
those about the run (run amend, end, pause, resume, attest, rollback), ``directives`` signs orders
and delivers them.
"""
