"""What torch and its watchdog of NCCL write when a device fails. Not a test itself."""

ECC = "uncorrectable ECC error encountered"


def torchs(reason: str, symbol: str = "cudaErrorECCUncorrectable") -> str:
    """The text of an error of CUDA as torch 2.13 makes it."""
    return f"""CUDA error: {reason}
Search for `{symbol}' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""


ERROR = torchs(ECC)
FRAMES = "\n".join(
    f"frame #{n}: c10d::ProcessGroupNCCL::watchdogHandler() + 0x{n}9 (0x7f{n:02} in /lib/libtorch_cuda.so)"
    for n in range(30)
)
RAISED = "Exception raised from c10_cuda_check_implementation at CUDAException.cpp:43 (most recent call first):"


def watchdogs(error: str = ERROR) -> str:
    """What the watchdog writes of an error before it aborts the process."""
    who = "[PG ID 0 PG GUID 0(default_pg) Rank 1] Process group watchdog thread terminated with exception: "
    text = f"{who}{error}\n{RAISED}\n{FRAMES}\n"
    return (
        f"[rank1]:[E1123 14:02:11.5 ProcessGroupNCCL.cpp:2093] {text}\n"
        f"terminate called after throwing an instance of 'c10::DistBackendError'\n  what():  {text}"
    )
