"""A run in the cells of a notebook, with no import but ``peer``.

Run the cells in an editor that supports ``# %%``, or all with ``python examples/notebook.py``.
Give a link as the first argument to join a run instead of starting one.
"""

# %% Read the run: a run file, an https address or a shoal:// link.
import sys
from pathlib import Path

import peer

HERE = Path(__file__).parent
run_file = peer.read_run(sys.argv[1] if len(sys.argv) > 1 else str(HERE / "tiny_gpt" / "run.toml"))
print(run_file.name, run_file.run_id[:16], f"{run_file.outer.fragments} fragments")

# %% Build the model and optimizer of the run. If the run file says "custom", use your own.
model = peer.build_model(run_file)
optimizer = peer.build_optimizer(run_file, model)
print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")

# %% Join. All networking happens in another process.
run = peer.join(
    sys.argv[1] if len(sys.argv) > 1 else run_file, model=model, optimizer=optimizer
).__enter__()
run.schedule(optimizer)
run.on("round", lambda fields: print(f"  round: fragment {fields['fragment']}"))
held_out = run.recipe_data.held_out[:16]
print("others join with:", run.link)

# %% Train for a while. Run this cell as often as you like.
for step, tokens in zip(range(20), run.data(), strict=False):
    loss = peer.next_token_loss(model, tokens)
    loss.backward()
    peer.clip_gradients(run_file, model)
    run.log(loss=loss, tokens=tokens[:, 1:].numel())
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step}  loss {loss.item():.3f}  peers {run.peers}")

# %% Measure the result.
print(f"held-out loss {peer.held_out_loss(model, held_out):.3f}")
print(f"blocked for {run.stats.blocked.fraction:.2%} of the time, fates {dict(run.stats.fates)}")

# %% Leave: finish the current round and save.
run.__exit__(None, None, None)
