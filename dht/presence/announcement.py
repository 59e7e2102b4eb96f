"""The signed record of this peer, in the version that was published last."""

from __future__ import annotations

import asyncio
import contextlib
import math

from dht.errors import DhtError
from dht.membership.reachability import Reachability
from dht.membership.table import bucket_key
from dht.presence.settings import DIRECTORY_TIMEOUT_S
from dht.presence.this_peer import ThisPeer


class Announcement:
    """Signs the own record and publishes it in the directory."""

    def __init__(self, this: ThisPeer, reachability: Reachability) -> None:
        self.wanted = asyncio.Event()
        """Set when the next heartbeat should come at once."""

        self.hurried_at = -math.inf
        """Time at which that was last so."""

        self._this = this
        self._reachability = reachability
        self._key = ""
        self._sealed: bytes | None = None
        """``None`` once a fact in it has changed."""

    def hurry(self) -> None:
        """Have the next heartbeat at once: a fact changed for which no peer should wait."""
        self.hurried_at = self._this.now()
        self.wanted.set()

    def outdate(self) -> None:
        """Note that a fact changed: the next hello carries a new record."""
        self._sealed = None

    def renew(self) -> bytes:
        """Sign a new record. Each heartbeat has a new sequence number."""
        this = self._this
        assert this.profile.run is not None
        this.own.reachable = self._reachability.reachable
        self._key = bucket_key(this.profile.run, this.table.own_bucket(this.now()))
        self._sealed = this.own.renew(self._key, wall_time=this.host.wall_time())
        return self._sealed

    def current(self) -> bytes:
        """The record to put into a hello; empty for a peer that is no member."""
        if not self._this.profile.is_member:
            return b""
        return self._sealed if self._sealed is not None else self.renew()

    async def publish(self, sealed: bytes) -> None:
        """Store a record that ``renew`` returned. A failure is made good at the next heartbeat."""
        ttl_s = self._this.settings.membership.expiry_s
        with contextlib.suppress(DhtError):
            await self._this.host.directory.publish(
                self._key, sealed, ttl_s=ttl_s, timeout_s=DIRECTORY_TIMEOUT_S
            )
