"""Presence of one peer in a run: the decisions of ``dht.membership``, carried out over a host.

In: an opened ``dht.host.Host``, an identity, a ``Profile`` and seed addresses. Out: the table of
members, events for the owner, and the verdict whether other peers can dial this one.

Start reading at ``presence`` (the object that an owner uses, its heartbeat, and how the parts are
put together). The parts, in the order in which they depend on each other: ``this_peer`` (what all
parts share: settings, events, the own signed record); ``dialler`` (connections); ``dial_back`` (can
others dial this peer); ``intake`` (records from the network, and reading the directory);
``run_files``; ``greeting`` (hellos); ``seeking`` (seeds, and the file of known peers);
``door`` (who is let in, and the directives of the run's owner).

Every part keeps its own state, and a part only calls parts before it in that order. All tasks
belong to the task group of ``Presence``. A failure of the network never ends a loop; a bug does.
"""
