"""How far the planner is off published runs of other codes.

    python -m tests.published check [--tables DIR]   errors by kind of run, of fitted and of held-out predictions
    python -m tests.published fit [--rounds 10]      the constants of plan/step_time.py, fitted again, and without each
                                                     table in turn; writes left_out.json and plan/held_out.json;
                                                     10 minutes

tables/ has the runs, as other people published them. runs.py reads them. codes.py imitates the codes that ran them.
requests.py makes a plan.step_time.Run of each. fit.py fits constants, without the runs that are held out.
Run these from the root of the checkout.
"""
