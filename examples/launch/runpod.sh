#!/bin/bash
# A template for learners in RunPod, and a pod of it. The pod's public ports are taken from RunPod's variables.
#
# Change: image, GPU, the size of the volume. Needs RUNPOD_API_KEY and SHOAL_LINK='shoal://...'
set -euo pipefail

call() {
  curl --fail-with-body --silent --show-error --request POST "https://rest.runpod.io/v1/$1" \
    --header "Authorization: Bearer $RUNPOD_API_KEY" --header 'Content-Type: application/json' --data "$2"
}

call templates '{
  "name": "shoal-learner",
  "imageName": "registry.example.org/shoal:cuda",
  "dockerStartCmd": ["join", "--plain"],
  "containerDiskInGb": 10,
  "volumeInGb": 20,
  "volumeMountPath": "/data",
  "ports": ["7701/tcp", "7702/tcp"],
  "env": {
    "SHOAL_YES": "1",
    "SHOAL_LISTEN": "/ip4/0.0.0.0/tcp/7701",
    "SHOAL_LANE": "7702",
    "SHOAL_PATIENCE": "8"
  }
}' | tee template.json

call pods "$(python3 -c '
import json, os
template = json.load(open("template.json"))["id"]
print(json.dumps({
    "name": "shoal-1",
    "templateId": template,
    "gpuTypeIds": ["NVIDIA GeForce RTX 4090"],
    "supportPublicIp": True,
    "env": {"SHOAL_LINK": os.environ["SHOAL_LINK"]},
}))')"
