"""Lanes: direct TCP connections between two peers for bulk streams.

Start reading at ``lane``, all connections of one peer.

- ``connection``: one of them, and limits; ``wire``: its messages; ``pacing``: room
  that it leaves to others on the line;
- ``meetings``: connections with peers behind routers, by ``punching`` at addresses that
  ``observers`` tell, and where that fails through a third peer, by ``relaying``;
- ``port_mapping``: asks the router for a port.
"""
