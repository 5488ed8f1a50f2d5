# The run itself: who owns it, and what a person sees of it. Needs and makes nothing but the run's lock.
import logging

from shardmill import session

# Scripts say what they did, once, in their own words; Snakemake's account of the same stays in its log file.
CHATTER = (
    "Select jobs to execute",
    "Execute ",
    "RuleException:",
    "Finished jobid",
    "Removing output files of failed",
)


def is_for_people(record):
    """Whether a line of Snakemake's belongs on the console of a run."""
    event = str(getattr(record, "event", ""))
    return event not in (
        "progress",
        "job_finished",
    ) and not record.getMessage().startswith(CHATTER)


onstart:
    try:
        session.begin(plan.config)
        for handler in logging.getLogger("snakemake.logging").handlers:
            if not isinstance(handler, logging.FileHandler):
                handler.addFilter(is_for_people)
        print(f"shardmill: {plan.opening_line()}", file=sys.stderr)
        for line in plan.check_room():
            print(f"shardmill: {line}", file=sys.stderr)
    except UserError as error:
        sys.exit(f"shardmill: error: {error}")


onsuccess:
    for line in session.end(plan.config):
        print(f"shardmill: warning: {line}", file=sys.stderr)
    if line := session.closing_line(plan.config):
        print(line, file=sys.stderr)


onerror:
    for line in session.end(plan.config):
        print(f"shardmill: warning: {line}", file=sys.stderr)
    print(
        "shardmill: not finished; everything finished so far is kept. The same command goes on from here.",
        file=sys.stderr,
    )


def keep_handler(name, own):
    """Have a handler of this module run before the main workflow's own, be that defined above or below.

    Snakemake leaves a module's handlers alone, but a run without its lock could write the same files twice.
    """
    register, then = getattr(workflow, name), getattr(workflow, f"_{name}")

    def register_both(handler):
        if workflow.modifier.is_main_snakefile():
            register(lambda log: (own(log=log), handler(log)))
        else:
            register(handler)

    setattr(workflow, name, register_both)
    setattr(workflow, f"_{name}", lambda log: (own(log=log), then(log)))


if is_module:
    keep_handler("onstart", onstart)
    keep_handler("onsuccess", onsuccess)
    keep_handler("onerror", onerror)
