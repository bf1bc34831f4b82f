"""`make gpu-check`: what only a machine with an accelerator shows, in ten minutes, on one page. Enter at `check.check_gpu`."""
