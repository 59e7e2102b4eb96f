#!/bin/bash
# A learner on a machine of Vast.ai. Its public ports are taken from Vast's variables.
#
# Change: what to search for, image, the size of the disk. Needs `pip install vastai`, its key, SHOAL_LINK='shoal://...'
# The disk stays while the instance is stopped, and goes when it is destroyed: first `vastai stop instance ID`.
set -euo pipefail

offer=$(vastai search offers 'gpu_name=RTX_4090 num_gpus=1 direct_port_count>=2 reliability>0.98' --order dph --limit 1 --raw |
  python3 -c 'import json, sys; print(json.load(sys.stdin)[0]["id"])')

vastai create instance "$offer" --image registry.example.org/shoal:cuda --disk 30 \
  --env "-p 7701:7701 -p 7702:7702 -e SHOAL_YES=1 -e SHOAL_LISTEN=/ip4/0.0.0.0/tcp/7701 -e SHOAL_LANE=7702 \
    -e SHOAL_PATIENCE=8 -e SHOAL_LINK=$SHOAL_LINK" \
  --args join --plain
