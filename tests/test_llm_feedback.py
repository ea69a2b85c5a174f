"""Feedback by a language model, against local servers that are fine, slow, broken or rate-limiting."""

import asyncio
import builtins
import json
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("openai", reason="the client library is missing: pip install 'sdpo-trl[llm]'")

from sdpo_trl.environments.llm_feedback import LLMFeedback, without_code


def completion(text, prompt_tokens=10, completion_tokens=5):
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": 15}
    message = {"role": "assistant", "content": text}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    return {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": choices, "usage": usage}


@contextmanager
def server(reply):
    """`reply(number, body) -> (status, headers, text)`; yields the base URL and what was asked."""
    asked, at_once, lock = [], [0, 0], threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                asked.append(body)
                number = len(asked)
                at_once[0] += 1
                at_once[1] = max(at_once)
            try:
                status, headers, text = reply(number, body)
                data = (text if isinstance(text, str) else json.dumps(text)).encode()
                self.send_response(status)
                for name, value in {"Content-Type": "application/json", **headers}.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except OSError:
                pass  # the client gave up
            finally:
                with lock:
                    at_once[0] -= 1

        def log_message(self, *arguments):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_address[1]}/v1", asked, at_once
    finally:
        httpd.shutdown()
        httpd.server_close()
        thread.join()


def fine(number, body):
    return 200, {}, completion("The loop starts at one.")


def build(url, **options):
    return LLMFeedback("m", base_url=url, api_key="none", **{"timeout_seconds": 5, "retries": 2, **options})


def failing(completions, log_extra=None, **columns):
    """A reward that fails the answers with `bad` in them, and says so."""
    log_extra("feedback", [f"error about {text}" if "bad" in text else None for text in completions])
    log_extra("other", [1] * len(completions))
    return [float("bad" not in text) for text in completions]


def explain(feedback, completions, prompts=None, **columns):
    """As the trainer does: grade, then ask."""
    passed_on = {}
    wrapped = feedback.wrap(failing)
    rewards = wrapped(completions=completions, log_extra=passed_on.__setitem__, **columns)
    assert "feedback" not in passed_on and passed_on["other"] == [1] * len(completions)
    return asyncio.run(feedback(prompts or ["question"] * len(completions), completions, rewards, **columns))


def test_failures_alone_are_explained():
    with server(fine) as (url, asked, _):
        feedback = build(url, request={"temperature": 0.0})
        texts = explain(feedback, ["good", "bad one", "good", "bad two"], hidden_tests=["secret"] * 4)
    assert texts == [None, "The loop starts at one.", None, "The loop starts at one."]
    assert vars(feedback.costs) == {
        "calls": 2, "explained": 2, "fell_back": 0, "prompt_tokens": 20, "completion_tokens": 10,
    }  # fmt: skip
    assert len(asked) == 2
    system, user = asked[0]["messages"]
    assert "Do not give the solution" in system["content"] and "Explain" in system["content"]
    assert "question" in user["content"] and "error about bad" in user["content"]
    assert "secret" not in json.dumps(asked) and asked[0]["temperature"] == 0.0 and asked[0]["max_tokens"] == 512


def test_without_a_wrapped_reward_the_rewards_decide():
    with server(fine) as (url, asked, _):
        feedback = build(url)
        messages = [[{"role": "user", "content": "a question {x}"}]] * 3
        texts = asyncio.run(feedback(messages, ["a", "b", "c"], [1.0, 0.5, float("nan")]))
    assert texts[0] is None and texts[1:] == ["The loop starts at one."] * 2
    assert "a question {x}" in asked[0]["messages"][1]["content"]


def test_code_in_the_explanation_is_left_out():
    said = "You forgot zero.\n```python\nprint(42)\n```\nLook at line 2.\n```\nprint(43)"
    with server(lambda number, body: (200, {}, completion(said))) as (url, _, _):
        (text,) = explain(build(url), ["bad"])
    assert text.split("\n") == ["You forgot zero.", "(code left out)", "Look at line 2.", "(code left out)"]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("Fix: ```python\nX\n```\nWhy.", "Fix: (code left out)\nWhy."),
        ("- ```python\n  X\n  ```\n  Why.", "- (code left out)\n  Why."),
        ("> ```python\n> X\n> ```\n> Why.", "> (code left out)\n> Why."),
        ("~~~\nX\n```\nX\n~~~\nWhy.", "(code left out)\nWhy."),
        ("````\n```\nX\n```\n````\nWhy.", "(code left out)\nWhy."),
        ("So.\r\n```python\r\nX\r\n```\r\nWhy.", "So.\n(code left out)\nWhy."),
        ("See ```x = 1``` and `y`.\nWhy.", "See ```x = 1``` and `y`.\nWhy."),
        ("   ```\nX", "   (code left out)"),
        ("", ""),
    ],
)
def test_blocks_are_left_out_wherever_they_stand(text, kept):
    assert without_code(text) == kept


def test_a_long_odd_text_is_read_once():
    start = time.monotonic()
    for text in (
        "`" * 1_000_000,
        ("`" * 1000 + "\n" + " " * 1000 + "\n") * 500,
        " " * 1_000_000 + "x",
        "```\n" * 200_000,
    ):
        without_code(text)
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("content", ["", "  \n", None, "```python\nprint(42)\n```"])
def test_a_reply_without_text_falls_back(content):
    with server(lambda number, body: (200, {}, completion(content))) as (url, _, _):
        feedback = build(url)
        assert explain(feedback, ["bad"]) == ["error about bad"]
    assert (feedback.costs.fell_back, feedback.costs.explained) == (1, 0)


def test_the_raw_error_can_stay():
    with server(fine) as (url, _, _):
        assert explain(build(url, include_error=True), ["bad"]) == ["error about bad\n\nThe loop starts at one."]


def test_requests_are_bounded():
    def slow(number, body):
        time.sleep(0.1)
        return fine(number, body)

    with server(slow) as (url, asked, at_once):
        start = time.monotonic()
        texts = explain(build(url, concurrency=3), ["bad"] * 9)
        assert 0.3 <= time.monotonic() - start < 3
    assert texts == ["The loop starts at one."] * 9 and len(asked) == 9
    assert 2 <= at_once[1] <= 3


def test_a_rate_limit_is_waited_for():
    def limited(number, body):
        return (
            (429, {"retry-after-ms": "50"}, {"error": {"message": "slow down"}}) if number <= 2 else fine(number, body)
        )

    with server(limited) as (url, asked, _):
        feedback = build(url)
        start = time.monotonic()
        assert explain(feedback, ["bad"]) == ["The loop starts at one."]
        assert 0.1 <= time.monotonic() - start < 3
    assert len(asked) == 3 and feedback.costs.calls == 1


def test_a_rate_limit_that_stays_falls_back_with_a_count(caplog):
    with server(lambda n, b: (429, {"retry-after-ms": "10"}, {"error": {"message": "no more"}})) as (url, asked, _):
        feedback = build(url)
        assert explain(feedback, ["bad", "good", "bad"]) == ["error about bad", None, "error about bad"]
    assert len(asked) == 6  # two answers, three tries each
    assert (feedback.costs.calls, feedback.costs.fell_back) == (2, 2)
    assert "No explanation (2 of 2 so far): RateLimitError" in caplog.text


@pytest.mark.parametrize(
    "reply",
    [
        (500, {"retry-after-ms": "10"}, "broken"),
        (200, {}, "{ not json"),
        (200, {"Content-Type": "text/html"}, "<html>a proxy's page</html>"),
        (200, {}, {**completion("x"), "choices": []}),
        (200, {}, "[]"),
        (200, {}, "null"),
        (200, {}, "[" * 100_000),
        (200, {}, {**completion("x"), "choices": {"a": 1}}),
        (200, {}, {**completion("x"), "choices": [None]}),
        (200, {}, {**completion("x"), "choices": [{"index": 0, "message": None}]}),
        (200, {}, {**completion("x"), "choices": [{}]}),
        (200, {}, completion(5)),
        (200, {}, {**completion("x"), "usage": "none"}),
    ],
)
def test_a_broken_server_falls_back(reply):
    with server(lambda number, body: reply) as (url, _, _):
        feedback = build(url, retries=1)
        assert explain(feedback, ["bad", "good"]) == ["error about bad", None]
    assert feedback.costs.fell_back == 1


@pytest.mark.parametrize("usage", [None, {}, {"prompt_tokens": None, "completion_tokens": 3}])
@pytest.mark.parametrize("content", ["Why.", [{"type": "text", "text": "Why."}]])
def test_what_servers_leave_out_or_spell_otherwise_is_read(usage, content):
    with server(lambda n, b: (200, {}, {**completion(content), "usage": usage})) as (url, _, _):
        feedback = build(url)
        assert explain(feedback, ["bad"]) == ["Why."]
    assert feedback.costs.prompt_tokens == 0 and feedback.costs.completion_tokens == (3 if usage else 0)


def test_a_reward_that_has_nothing_to_say_is_wrapped():
    feedback = build("http://127.0.0.1:1/v1")
    wrapped = feedback.wrap(lambda completions, **columns: [1.0] * len(completions))
    assert asyncio.run(feedback(["q"], ["good"], wrapped(completions=["good"]))) == [None]


def test_a_wrapped_reward_is_called_in_the_main_thread_if_it_must_be():
    def alarmed(completions, **columns):
        return [1.0] * len(completions)

    assert not hasattr(build("http://127.0.0.1:1/v1").wrap(alarmed), "limits_itself")
    alarmed.limits_itself = True
    assert build("http://127.0.0.1:1/v1").wrap(alarmed).limits_itself


def test_a_passing_fault_is_retried():
    with server(lambda n, b: (503, {"retry-after-ms": "10"}, "busy") if n == 1 else fine(n, b)) as (url, asked, _):
        assert explain(build(url), ["bad"]) == ["The loop starts at one."]
    assert len(asked) == 2


def test_a_slow_server_meets_the_time_limit():
    def stuck(number, body):
        time.sleep(1.5)
        return fine(number, body)

    with server(stuck) as (url, _, _):
        feedback = build(url, timeout_seconds=0.2, retries=0)
        start = time.monotonic()
        assert explain(feedback, ["bad"] * 3) == ["error about bad"] * 3
        assert time.monotonic() - start < 1.4
        patient = build(url, timeout_seconds=30, total_seconds=0.3)
        assert explain(patient, ["bad"]) == ["error about bad"] and patient.costs.fell_back == 1


def test_a_server_that_is_not_there_falls_back():
    feedback = build("http://127.0.0.1:9/v1", retries=0)
    assert explain(feedback, ["bad"]) == ["error about bad"] and feedback.costs.fell_back == 1


@pytest.mark.parametrize("status", [400, 401, 403, 404])
def test_a_refusal_at_the_start_is_an_error(status):
    import openai

    def refuse(number, body):
        return status, {}, {"error": {"message": "no such model or key"}}

    with server(refuse) as (url, _, _), pytest.raises(openai.APIStatusError, match="no such model or key"):
        explain(build(url), ["bad"])


def test_a_refusal_later_falls_back():
    with server(lambda n, b: fine(n, b) if n == 1 else (400, {}, {"error": {"message": "too long"}})) as (url, _, _):
        feedback = build(url, concurrency=1)
        assert explain(feedback, ["bad one", "bad two"]) == ["The loop starts at one.", "error about bad two"]


def test_long_texts_are_cut_and_odd_ones_are_sent():
    with server(fine) as (url, asked, _):
        feedback = build(url, characters=500)
        asyncio.run(feedback(["p" * 10_000 + "\ud800\x00"], ["a" * 10_000], [0.0]))
    assert len(asked[0]["messages"][1]["content"]) < 1200


def test_rollouts_must_have_been_graded():
    feedback = build("http://127.0.0.1:9/v1")
    wrapped = feedback.wrap(failing)
    assert wrapped.__name__ == "failing"
    with pytest.raises(RuntimeError, match="graded these very rollouts"):
        asyncio.run(feedback(["p"], ["bad"], [0.0]))
    with pytest.raises(TypeError, match="takes one reward function"):
        feedback.wrap(failing)

    async def later(**columns):
        return []

    with pytest.raises(TypeError, match="not async"):
        build("http://127.0.0.1:9/v1").wrap(later)

    class Later:
        async def __call__(self, completions, **columns):
            return [0.0]

    with pytest.raises(TypeError, match="not async"):
        build("http://127.0.0.1:9/v1").wrap(Later())


@pytest.mark.parametrize(
    ("name", "value"), [("concurrency", 0), ("retries", -1), ("timeout_seconds", 0), ("characters", 0)]
)
def test_odd_options_are_refused(name, value):
    with pytest.raises(ValueError, match=name):
        build("http://127.0.0.1:9/v1", **{name: value})


def test_a_missing_key_is_said_before_anything_is_sampled(monkeypatch):
    for name in ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=r"http://a/v1.*OPENAI_API_KEY"):
        LLMFeedback("m", base_url="http://a/v1")
    LLMFeedback("m", base_url="http://a/v1", api_key="none")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    LLMFeedback("m")


def test_without_the_client_library_the_error_says_how_to_install_it(monkeypatch):
    real = builtins.__import__

    def without(name, *arguments, **options):
        if name == "openai":
            raise ImportError(name)
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'sdpo-trl\[llm\]'"):
        LLMFeedback("m")


def test_explanations_reach_the_teachers_prompt(tmp_path):
    import tiny

    with server(fine) as (url, _, _):
        feedback = build(url)
        trainer = tiny.trainer(
            tmp_path,
            reward=feedback.wrap(failing),
            trainer_feedback_func=feedback,
            trainer_rollout_func=tiny.scripted(["bad$", "bad$", "bad$", "bad$"]),
        )
        (inputs,) = tiny.micro_batches(trainer)
    prompts = trainer.processing_class.batch_decode(inputs["teacher_prompt_ids"])
    assert all("The loop starts at one." in prompt and "error about" not in prompt for prompt in prompts)
    assert feedback.costs.explained == 8
