"""Why a run failed, hangs or was ended: who is to blame, and in which words.

    facts          what is known of each rank; the types that the other modules share
    ledger         who can no longer be met (returned, left, failed, ended), and which ranks wait for one of them
    evidence       reported errors that only say that another rank was not there
    first_to_fail  which rank failed first, where within milliseconds all of them fail
    diagnosis      why a run was ended that no rank ended by failing
    recorder       which collectives a rank has called; runs in the rank
    missed         in which collective ranks missed each other, by what each recorder says
    mismatch       what collectives say of a failure
    stacks         from what a rank answered to the reader's own line; who stands apart
    threads        threads of a rank that have ended by an exception
    silence        whether a rank that does not answer would have, if it could
    hang           what a run that makes no progress is ended with
    exit_codes     exit codes in words
    grouping       puts ranks with the same message into one line
    source         whose a source file is, and what is in it
    pages          what messages mean and what to do: a page for each kind

All but `recorder` and `silence` know no process: they are given facts.
"""
