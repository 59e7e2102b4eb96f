"""The bridge between a trainer and its agent, two processes of one peer.

In: messages and parameters of one side. Out: the same at the other side, without waiting.

- ``shared_memory``: one fp32 slot per fragment, with a state word that says which side may use it;
- ``settings``: what the user of a peer chooses for it, carried whole to the agent;
- ``messages``: everything else that the two say, and its framing on a socket;
- ``agent_process``: the trainer's end, which starts the agent and replaces it when it dies;
- ``trainer_line``: the agent's end, on its event loop.

Start reading at the table of slot states in ``shared_memory``. The layouts of memory and messages
are shared by both processes of one installation; other peers never see them. Not allowed here:
torch, the network, imports of other rooms of ``peer`` (but ``peer.rules``), and any wait of the
training thread for the agent.
"""
