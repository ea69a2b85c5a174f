"""What runs inside the sandbox, before and around the judged program. Its text is handed to `python -S -c`.

Knows: its limits, the program, one input. Deliberately does not know: expected answers, other tests, verdicts.
Nothing here is trusted once the program has started: it shares the interpreter, so it may forge whatever this file
would write. That is why the only thing sent back is the program's own output or return value, which the parent
compares with an answer that never entered the sandbox. As few imports as can be: they cost time.

Arguments: mode (`script` or `call`), bytes of prelude, bytes of code, memory, CPU seconds, disk, files, tasks (0: not
limited here), name of the function. Standard input: prelude, code, then the program's input (`script`) or a JSON list
of arguments (`call`).
"""

import os
import resource
import sys


def set_limits(memory, cpu, disk, files, tasks):
    """Soft and hard, so that the program cannot raise them; the hard CPU limit kills also a process 1."""
    wanted = [
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_FSIZE, disk),
        (resource.RLIMIT_NOFILE, files),
        (resource.RLIMIT_NPROC, tasks),
        (resource.RLIMIT_CORE, 1),  # 0 would still start a crash handler of the host, where it has one; 1 does not
    ]
    for kind, value in wanted:
        if kind == resource.RLIMIT_NPROC and not value:
            continue
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))


def offer_to_the_oom_killer():
    """If the machine runs out of memory, the program goes before the trainer."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except PermissionError:  # refused where the container sets a higher least value: then it is offered already
        return


def read_exactly(size):
    """From the file descriptor, so that what follows stays for the program."""
    parts = []
    while size:
        part = os.read(0, min(size, 1 << 20))
        if not part:
            raise EOFError("The sandbox's input ended early.")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def read_rest():
    parts = []
    while True:
        part = os.read(0, 1 << 20)
        if not part:
            return b"".join(parts)
        parts.append(part)


def show(error, source):
    """The traceback without this file's frame, with the lines of the program, which exists in no file."""
    import linecache
    import traceback

    lines = source.decode("utf-8", "replace").splitlines(True)
    linecache.cache["solution.py"] = (len(source), None, lines, "solution.py")
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != "solution.py":
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


def find(space, name):
    """The function, or the method of a class `Solution`, as the benchmarks have it."""
    if "Solution" in space and hasattr(space["Solution"], name):
        return getattr(space["Solution"](), name)
    if name not in space:
        raise NameError(f"There is no function named {name!r}, neither alone nor in a class `Solution`.")
    return space[name]


def main():
    mode, prelude_size, code_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    name = sys.argv[9]
    for descriptor in os.listdir("/proc/self/fd"):
        if int(descriptor) > 2:
            # The pipe that told the process id; the one that listed them is closed already.
            os.closerange(int(descriptor), int(descriptor) + 1)
    offer_to_the_oom_killer()
    set_limits(*[int(number) for number in sys.argv[4:9]])
    # The sandbox stands: whatever fails from here is the program's. The parent sends nothing before it has read this,
    # so if it dies earlier, when its death is not yet a signal to this process, there is nothing to run.
    os.write(1, b"\x06")
    prelude, code = read_exactly(prelude_size), read_exactly(code_size)
    program = type(sys)("__main__")
    program.__file__ = "solution.py"
    sys.modules["__main__"] = program
    sys.argv[:] = ["solution.py"]
    sys.path[:] = [folder for folder in sys.path if folder]
    import builtins

    builtins.exit = builtins.quit = sys.exit  # `site`, which makes them, is not loaded
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    channel = -1
    if mode == "call":
        import json

        # Prints of the program go to standard error; the return value has standard output for itself.
        arguments = json.loads(read_rest().decode("utf-8", "surrogatepass"))
        channel = os.dup(1)
        os.dup2(2, 1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        exec(compile(prelude, "prelude.py", "exec"), program.__dict__)
        exec(compile(code, "solution.py", "exec", dont_inherit=True), program.__dict__)
        if mode == "script":
            return
        value = find(program.__dict__, name)(*arguments)
        try:
            text = json.dumps({"result": value})
        except (TypeError, ValueError, RecursionError) as reason:
            raise TypeError(
                f"The function returned a {type(value).__name__}, which is no plain data: {reason}"
            ) from None
    except SystemExit:
        raise
    except BaseException as error:
        show(error, code)
        sys.exit(1)
    sys.stdout.flush()
    data = text.encode()
    while data:
        data = data[os.write(channel, data) :]
    os._exit(0)  # threads that the program left behind do not hold the answer up


main()
