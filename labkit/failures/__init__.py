"""Why a run failed, hangs or was ended: the diagnosis, its wording, and the help pages.

    facts          what is known of each rank; the types that the other modules share
    missed         what each rank has entered and left, compared: the collective in which ranks missed each other
    ledger         who was missed: ranks that nobody can meet any more, and those that kept others waiting
    evidence       reported errors that only say that another rank was not there
    first_to_fail  which rank failed first, when all of them fail within milliseconds
    known_errors   the page of each message that people search for
    diagnosis      runs that labkit ended: a hang, an error of its own
    stacks         a rank's stack, and the user's line in it; outliers among the ranks
    frames         the user's frames of a rank that failed, with their variables
    exit_codes     exit codes as text
    grouping       one line for all ranks with the same message
    pages          the help pages, one for each kind of message, in Markdown: `labkit.explain("hang")`

All are pure: they are given facts, so that every case can be tested without a process.
"""
