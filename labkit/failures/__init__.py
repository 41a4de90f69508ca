"""Why a run failed, hangs or was ended: the diagnosis, its wording, and the help pages.

    facts          what is known of each rank; the types that the other modules share
    ledger         ends and waits: ranks that nobody can meet any more, and ranks that wait for one of them
    evidence       reported errors that only say that another rank was not there
    first_to_fail  which rank failed first, when all of them fail within milliseconds
    known_errors   the page of each message that people search for
    diagnosis      runs that labkit ended: a hang, an error of its own
    missed         the collective in which ranks missed each other, from every rank's recorder
    mismatch       what collectives reveal about a failure
    stacks         a rank's stack, and the user's line in it; outliers among the ranks
    frames         the user's frames of a rank that failed, with their variables
    exit_codes     exit codes as text
    grouping       one line for all ranks with the same message
    pages          the help pages, one for each kind of message, in Markdown: `labkit.explain("hang")`

All are pure: they are given facts, so that every case can be tested without a process.
"""
