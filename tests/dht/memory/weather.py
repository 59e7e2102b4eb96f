"""The weather of tests on the in-memory network."""

from dht.memory.network import Weather

STORM = Weather(
    latency_s=(0.05, 0.5),
    jitter_s=0.1,
    bandwidth_bytes_s=5e6,
    connection_loss=0.02,
    duplicate=0.1,
    calls_lost=0.02,
)
