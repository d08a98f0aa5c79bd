"""The quickstart over several seeds: does it learn, how fast, with how much memory, and do the pools get their shares?

    python benchmarks/quickstart.py [--seeds 0 1 2] [--dir FOLDER] [--key value of `farflung quickstart` ...]

Each seed is a whole `farflung quickstart` in a process of its own, from command to result. The last line is JSON: the
smallest gain in held-out pass@1 over the seeds, the longest wall time in seconds, the largest memory in bytes, the largest
distance between a pool's share of samples and of capacity, lost episodes, and whether NVFP4 had the largest KL and BF16
the smallest in every seed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def quickstart(seed: int, folder: Path, extra: list[str]) -> dict[str, Any]:
    """One run; its summary."""
    summary = folder / f"seed-{seed}.json"
    command = [
        sys.executable,
        "-m",
        "farflung.cli.main",
        "quickstart",
        "--seed",
        str(seed),
        "--dir",
        str(folder / f"seed-{seed}"),
    ]
    subprocess.run([*command, "--summary", str(summary), *extra], check=True, stdout=sys.stderr)
    result: dict[str, Any] = json.loads(summary.read_text())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--dir", type=Path, help="keep the runs here")
    args, extra = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="quickstart-") as name:
        folder = args.dir or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        results = [quickstart(seed, folder, extra) for seed in args.seeds]
    for seed, r in zip(args.seeds, results, strict=True):
        pools = "  ".join(
            f"{name} {p['sample_share']:.1%} of {p['capacity_share']:.0%}, KL {p['kl']:.5f}, out {p['out_of_band_share']:.2%}, "
            f"{p['tokens_per_s']:.0f} tok/s"
            for name, p in r["pools"].items()
        )
        print(
            f"seed {seed}: pass@1 {r['pass1_before']:.3f} ± {r['pass1_before_se']:.3f} -> {r['pass1_after']:.3f} ± "
            f"{r['pass1_after_se']:.3f}, pass@4 {r['pass4_before']:.3f} -> {r['pass4_after']:.3f}; {r['updates']} updates, "
            f"{r['episodes']} episodes, staleness {r['staleness_mean']:.2f}, dropped {r['dropped']}, {r['wall_s']:.0f} s, "
            f"{r['peak_rss_bytes'] / 2**30:.2f} GiB\n  {pools}"
        )
    kls = [{name: pool["kl"] for name, pool in r["pools"].items()} for r in results]
    print(
        json.dumps(
            {
                "pass1_gain_min": round(min(r["pass1_after"] - r["pass1_before"] for r in results), 4),
                "wall_s_max": max(r["wall_s"] for r in results),
                "peak_rss_bytes_max": max(r["peak_rss_bytes"] for r in results),
                "share_error_max": round(
                    max(abs(p["sample_share"] - p["capacity_share"]) for r in results for p in r["pools"].values()), 4
                ),
                "dropped": sum(sum(r["dropped"].values()) for r in results),
                "kl_nvfp4_largest_bf16_smallest": all(
                    max(kl, key=kl.__getitem__) == "nvfp4" and min(kl, key=kl.__getitem__) == "bf16" for kl in kls
                ),
            }
        )
    )


if __name__ == "__main__":
    main()
