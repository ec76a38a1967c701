import os.path

if os.path.isdir(__path__[0]) and not os.path.isdir(os.path.join(__path__[0], "broker")):
    raise ImportError(
        f"{os.path.join(__path__[0], 'broker')} is not a folder: this copy of the repository was made without symbolic links; "
        "clone it with `git clone -c core.symlinks=true`, which on Windows needs its developer mode, or install a wheel"
    )
