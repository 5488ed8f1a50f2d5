# The run itself: who owns it, and what is said at its end. Needs and makes nothing but the run's lock.
from shardmill import session


onstart:
    try:
        session.begin(plan.config)
        print(f"shardmill: {plan.opening_line()}", file=sys.stderr)
    except UserError as error:
        sys.exit(f"shardmill: error: {error}")


onsuccess:
    session.end(plan.config)
    print(session.closing_line(plan.config), file=sys.stderr)


onerror:
    session.end(plan.config)
    print(
        "shardmill: not finished; everything finished so far is kept. See the errors above, then run the same command again.",
        file=sys.stderr,
    )
