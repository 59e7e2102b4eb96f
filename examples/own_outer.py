"""An outer optimizer of your own in a simulated swarm.

    cd examples
    shoal simulate --set outer.optimizer=nesterov,own_outer:HeavyBall --seeds 3

It takes the merged displacement, by which parameters fall, and one vector of memory that travels
with the state. It is called with parts of a fragment, so each value may depend on the others at its
place only.

For simulations only: in a run, a commit names learning rate and momentum of Nesterov's step, and
peers that take another one would not agree on the state.
"""

import numpy as np

from peer.simulate import Float32s


class HeavyBall:
    """Plain momentum, without Nesterov's look ahead."""

    rate, decay = np.float32(0.7), np.float32(0.6)

    def step(self, before: Float32s, moved: Float32s, momentum: Float32s, theta: Float32s) -> None:
        np.multiply(momentum, self.decay, out=momentum)
        np.add(momentum, moved, out=momentum)
        np.subtract(before, self.rate * momentum, out=theta)
