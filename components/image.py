"""The images that the steps run in; a profile or a run-time argument may name others."""

CPU_IMAGE = "csc-cpu:latest"
TRAIN_IMAGE = "csc-train:latest"
