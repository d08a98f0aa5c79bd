"""Make .venv and install farflung into it. Standard library only; a second run takes a fraction of a second.

    python3 scripts/bootstrap.py          what a user needs
    python3 scripts/bootstrap.py --dev    the tools of `make test` too

torch comes as a CPU build unless an NVIDIA GPU is there: on Linux the default build carries gigabytes of CUDA libraries.
Everything that pip says goes to .venv/install.log; the terminal gets one line per step.
"""

import argparse
import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
LOG = os.path.join(VENV, "install.log")
WINDOWS = os.name == "nt"
PYTHON = os.path.join(VENV, "Scripts" if WINDOWS else "bin", "python.exe" if WINDOWS else "python")
OLDEST = (3, 11)
ANY_TORCH = "make quickstart TORCH=any"
TERMINAL = sys.stdout.isatty()


class Trouble(Exception):
    """What went wrong and what to do about it."""


def main():
    parser = argparse.ArgumentParser(description="Make .venv and install farflung into it.")
    parser.add_argument("--dev", action="store_true", help="also what `make test` needs")
    parser.add_argument("--any-torch", action="store_true", help="take the build of torch that pip takes, CUDA or not")
    args = parser.parse_args()
    use_suitable_python()
    stamp = os.path.join(VENV, "farflung-installed.json")
    wanted = fingerprint()
    done = read_json(stamp)
    if done.get("fingerprint") == wanted and (done.get("dev") or not args.dev) and os.path.exists(PYTHON):
        return
    started = time.monotonic()
    dev = args.dev or bool(done.get("dev"))
    make_venv()
    install(dev, args.any_torch)
    check_torch(args.any_torch)
    with open(stamp, "w") as file:
        json.dump({"fingerprint": wanted, "dev": dev}, file)
    say(f"Ready after {time.monotonic() - started:.0f} s.")


def use_suitable_python():
    """Go on in a Python that is new enough, if the one that runs this is not."""
    if sys.version_info >= OLDEST:
        return
    for minor in (13, 12, 11, 14):
        found = shutil.which(f"python3.{minor}")
        if found and subprocess.run([found, "-c", "import venv"], stderr=subprocess.DEVNULL).returncode == 0:
            os.execv(found, [found, *sys.argv])
    raise Trouble(
        f"farflung needs Python {OLDEST[0]}.{OLDEST[1]} or newer; this is {platform.python_version()} ({sys.executable}).\n"
        "Install a newer one (Debian and Ubuntu: apt install python3.11 python3.11-venv; macOS: brew install python)\n"
        "and say which if it is not on PATH: make quickstart PYTHON=/path/to/python3.11"
    )


def fingerprint():
    """Changes when the installation must be brought up to date: dependencies, this script, the place."""
    digest = hashlib.sha256(f"{ROOT} {platform.machine()}".encode())
    for name in ("pyproject.toml", "scripts/bootstrap.py"):
        with open(os.path.join(ROOT, name), "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()


def make_venv():
    if (
        os.path.exists(PYTHON)
        and subprocess.run([PYTHON, "-c", "import pip"], stderr=subprocess.DEVNULL).returncode == 0
    ):
        return
    say("Creating .venv")
    made = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", VENV], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if made.returncode != 0:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        raise Trouble(
            f"{sys.executable} -m venv failed:\n{indent(made.stdout)}\n"
            f"Debian and Ubuntu keep it in a package of its own: apt install python{version}-venv"
        )


def install(dev, any_torch):
    open(LOG, "w").close()
    pip("Updating pip", "--upgrade", "pip")
    if not has_torch():
        requirement = torch_requirement()
        wants_cpu = sys.platform == "linux" and not has_nvidia_gpu() and not any_torch
        if wants_cpu and pip_takes_cuda(requirement):
            pip("Installing uv, which can choose torch's CPU build", "uv>=0.6")
            run_logged(
                f"Installing {requirement}, CPU build",
                [PYTHON, "-m", "uv", "pip", "install", "--python", PYTHON, "--torch-backend=cpu", requirement],
            )
        else:
            pip(f"Installing {requirement}", requirement)
    pip("Installing farflung" + (" and its tools for tests" if dev else ""), "-e", ROOT + ("[dev]" if dev else ""))


def torch_requirement():
    """The tested version, from pyproject.toml."""
    import tomllib

    with open(os.path.join(ROOT, "pyproject.toml"), "rb") as file:
        constraints = tomllib.load(file)["tool"]["uv"]["constraint-dependencies"]
    return next(c for c in constraints if c.startswith("torch=="))


def has_torch():
    code = "import importlib.metadata as m; m.version('torch')"
    return subprocess.run([PYTHON, "-c", code], stderr=subprocess.DEVNULL).returncode == 0


def has_nvidia_gpu():
    return os.path.exists("/proc/driver/nvidia/version") or os.path.exists("/dev/nvidia0") or os.path.exists("/dev/dxg")


def pip_takes_cuda(requirement):
    """Whether pip would bring CUDA libraries along with torch on this machine."""
    say("Asking which build of torch pip would take")
    with open(LOG, "a") as log:
        asked = subprocess.run(
            [PYTHON, "-m", "pip", "install", "--dry-run", "--quiet", "--report", "-", requirement],
            stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
    if asked.returncode != 0:
        raise failed("asking pip for torch")
    names = [entry["metadata"]["name"].lower() for entry in json.loads(asked.stdout)["install"]]
    return any(name.startswith(("nvidia-", "cuda-")) for name in names)


def check_torch(any_torch):
    say("Trying torch")
    code = "import json, torch; print(json.dumps([torch.__version__, torch.version.cuda]))"
    tried = subprocess.run([PYTHON, "-W", "ignore", "-c", code], capture_output=True, text=True)
    if tried.returncode != 0:
        raise Trouble(f"torch is installed but cannot be imported:\n{indent(tried.stderr[-2000:])}")
    version, cuda = json.loads(tried.stdout)
    if cuda is not None and not has_nvidia_gpu() and not any_torch:
        raise Trouble(
            f"torch {version} is a CUDA build and no NVIDIA GPU is here. It works, but it is not what was asked for:\n"
            f"remove .venv and start again, or take it as it is: {ANY_TORCH}"
        )
    say(f"torch {version}, {'CUDA ' + cuda if cuda else 'CPU build'}")


def pip(title, *arguments):
    command = [PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    raw = ["--progress-bar", "raw"] if pip_version() >= (24, 1) else []
    run_logged(title, [*command, *raw, *arguments])


def pip_version():
    asked = subprocess.run([PYTHON, "-m", "pip", "--version"], stdout=subprocess.PIPE, text=True)
    return tuple(int(n) for n in re.findall(r"\d+", asked.stdout)[:2])


def run_logged(title, command):
    """Run an installer: its words to the log, a line that moves to the terminal."""
    started = time.monotonic()
    say(title)
    what = ""
    with open(LOG, "a") as log:
        log.write(f"\n$ {' '.join(command)}\n")
        log.flush()
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT)
        for line in child.stdout:
            progress = re.match(r"Progress (\d+) of (\d+)", line)
            if progress:
                live(f"{what} {int(progress[1]) / 1e6:.0f} of {int(progress[2]) / 1e6:.0f} MB")
                continue
            log.write(line)
            words = line.split()
            if words and words[0] in ("Collecting", "Downloading", "Using", "Building", "Installing"):
                what = (
                    f"{words[0].lower()} {os.path.basename(words[-1] if words[0] == 'Using' else ' '.join(words[1:2]))}"
                )
                live(what)
        code = child.wait()
    live("")
    if code != 0:
        raise failed(title[:1].lower() + title[1:])
    if time.monotonic() - started > 5:
        say(f"  {time.monotonic() - started:.0f} s")


def failed(doing):
    """The end of the log, with the likeliest mend."""
    with open(LOG, errors="replace") as file:
        tail = [line.rstrip() for line in file if not line.startswith(("WARNING", "  warn"))][-15:]
    text = "\n".join(tail)
    if "CPU build" in doing and re.search(r"error sending request|dns error|Connection|timed out", text, re.I):
        mend = f"The CPU builds cannot be reached. pip's own build is a CUDA one, which works too and is large: {ANY_TORCH}"
    elif re.search(r"name resolution|Connection|timed out|Network is unreachable|getaddrinfo", text, re.I):
        mend = (
            "No network? The first start downloads about 500 MB; an own index or proxy is set with pip's own settings."
        )
    elif re.search(r"No matching distribution|no wheels|from versions", text):
        mend = f"There may be no build for Python {platform.python_version()} on {platform.machine()}: try PYTHON=python3.11."
    elif re.search(r"No space left", text):
        mend = "The disk is full: about 2 GB are needed."
    else:
        mend = "Mend it and run the same command again: it goes on where it stopped."
    return Trouble(f"{doing} failed:\n{indent(text)}\n{mend}\nThe whole log: {os.path.relpath(LOG)}")


def say(text):
    print(text, flush=True)


def live(text):
    """A line that the next one replaces; nothing where output is not a terminal."""
    if TERMINAL:
        width = shutil.get_terminal_size().columns
        print("\r\033[2K" + ("  " + text)[: width - 1] if text else "\r\033[2K", end="", flush=True)


def indent(text):
    return "\n".join("  " + line for line in text.strip().splitlines())


def read_json(path):
    with contextlib.suppress(OSError, ValueError), open(path) as file:
        return json.load(file)
    return {}


if __name__ == "__main__":
    try:
        main()
    except Trouble as trouble:
        sys.exit(f"\n{trouble}")
    except KeyboardInterrupt:
        sys.exit("\nStopped. Run the same command again: it goes on where it stopped.")
