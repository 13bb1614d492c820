"""The one place that imports grpc, whose core reads its environment when it loads."""

import os

# gRPC's core would write a line to stderr for every peer that goes.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
# Wake up for a message rather than for each packet: a fifth of the CPU time of a stream on a 100 Mbit/s link.
os.environ.setdefault("GRPC_EXPERIMENTS", "tcp_frame_size_tuning,tcp_rcv_lowat")

import grpc
import grpc.aio

__all__ = ["grpc"]
