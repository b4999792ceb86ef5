from scalerl.rl.loop.evaluations import Agenda


def test_evaluations_are_due_at_even_shares_and_each_once():
    agenda = Agenda(4)
    shares = [0.1, 0.25, 0.3, 0.6, 0.76, 0.99, 1.0]
    assert [agenda.evaluates(share) for share in shares] == [False, True, False, True, True, False, True]


def test_one_step_may_cost_any_multiple_of_the_budget():
    for share in (1.0, 1.7, 1e30):
        agenda = Agenda(3, [0.5])
        assert agenda.evaluates(share)
        assert agenda.to_freeze(share)
        agenda.froze(share)
        assert not agenda.to_freeze(share)
        assert agenda.due == 4
