"""The KVHearth daemon."""

import os

# gRPC's C library prints what a peer sends as it came: forged lines, terminal escapes. It reads
# this when it is loaded; another value in the environment is for another program.
os.environ["GRPC_VERBOSITY"] = "NONE"
