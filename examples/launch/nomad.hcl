# Learners in Nomad: a job with one group, whose allocations go on from a host volume.
#
# Change: image, count, the GPU, the volume. The link: nomad var put nomad/jobs/shoal link='shoal://...'
# A client kills after 30 s whatever stands here, unless its own configuration has max_kill_timeout = "330s".

job "shoal" {
  group "learners" {
    count = 4

    volume "data" {
      type            = "host"
      source          = "shoal"
      sticky          = true
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
    }

    restart {
      attempts = 10
      interval = "1h"
      delay    = "30s"
      mode     = "delay"
    }

    task "learner" {
      driver       = "docker"
      kill_signal  = "SIGTERM"
      kill_timeout = "330s" # more than SHOAL_PATIENCE

      config {
        image = "registry.example.org/shoal:cuda"
        args  = ["join", "--plain"]
      }

      template {
        data        = "SHOAL_LINK={{ with nomadVar \"nomad/jobs/shoal\" }}{{ .link }}{{ end }}"
        destination = "secrets/link.env"
        env         = true
      }

      env {
        SHOAL_YES       = "1"
        SHOAL_DIRECTORY = "/data/peer"
        SHOAL_PATIENCE  = "300"
      }

      volume_mount {
        volume      = "data"
        destination = "/data"
      }

      resources {
        cpu    = 2000
        memory = 16384
        device "nvidia/gpu" {}
      }
    }
  }
}
