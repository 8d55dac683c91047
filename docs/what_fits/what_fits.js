// The page "What fits where". All numbers come from numbers.json, which compute.py computes with the code of the
// estimates. This script adds them for each interval of a step, compares the sum with the GPU's memory, and draws bars.
(() => {
  const numbers = JSON.parse(document.getElementById("numbers").textContent);
  const BYTES_PER_MIB = 2 ** 20;
  const MIB_PER_GIB = 2 ** 10;
  const NEW_LINE = " \\\n  "; // continues a shell command on the next line

  // key: the name in numbers.choices and in the page's address
  const CONTROLS = [
    { key: "model", label: "Model" },
    { key: "length", label: "Tokens of a sequence" },
    { key: "batch", label: "Micro batch" },
    { key: "accumulation", label: "Accumulation" },
    { key: "precision", label: "Precision" },
    { key: "loss", label: "Loss" },
    { key: "attention", label: "Attention (BLOOM)" },
    { key: "checkpointing", label: "Activation checkpointing" },
    { key: "gpus", label: "GPUs" },
    { key: "per_node", label: "GPUs of a node" },
    { key: "memory", label: "GiB of a GPU" },
  ];
  const DEFAULTS = {
    model: "bloom-560m", length: "512", batch: "4", accumulation: "4", precision: "bf16", loss: "full",
    attention: "eager", checkpointing: "no", gpus: "4", per_node: "4", memory: "40", method: "zero2",
  };
  const POSSIBLE = {
    ...Object.fromEntries(Object.entries(numbers.choices).map(([key, values]) => [key, values.map(String)])),
    checkpointing: ["no", "yes"],
    method: numbers.methods.map((method) => method.name),
  };
  const SIGNS = ["✓", "≈", "✗"]; // one for each of numbers.verdicts
  const PARTS = ["parameters", "gradients", "optimizer state", "buffers", "activations", "logits", "head"];

  let choice = { ...DEFAULTS };

  // 1. Memory and messages of a method

  const isBloom = () => choice.model.startsWith("bloom");
  // The custom GPT with more positions has more parameters
  const model = () => numbers.models[`${choice.model} ${choice.length}`] ?? numbers.models[choice.model];
  const nodes = () => Math.max(1, Math.floor(choice.gpus / choice.per_node));
  const layout = () => `${nodes()}x${choice.gpus / nodes()}`;
  const methodLabel = (method) => (method.name === "DDP" && choice.gpus === "1" ? "plain" : method.name);

  // Return the largest states of memory in the passes: the interval, and bytes of activations, logits and head
  function passStates(method) {
    const attention = isBloom() ? choice.attention : "sdpa";
    const checkpointing = method.checkpointing ? "yes" : choice.checkpointing;
    const passes = model().passes[choice.precision][attention][method.activations][choice.length];
    const chunk = model().chunks[choice.precision][method.activations][choice.batch * choice.length];
    return passes[choice.loss][checkpointing].map(([interval, fixed, perSequence, head, logits]) => ({
      interval,
      held: [fixed + choice.batch * perSequence, logits * (choice.loss === "full" ? choice.batch : chunk), head],
    }));
  }

  // Return GiB of each part in the fullest interval of a step, and GB sent. Return null if the method cannot be used
  function computeNeeds(method) {
    const row = [...model().cells[choice.precision][choice.accumulation][layout()][numbers.methods.indexOf(method)]];
    if (row.length === 0) {
      return null;
    }
    const take = () => row.splice(0, numbers.intervals.length);
    const [parameters, optimizerState] = row.splice(0, numbers.whole_step.length);
    const [gradients, buffers] = [take(), take()];
    const [cpu, sent, sentBetweenNodes] = row;
    const candidates = [...passStates(method), { interval: "step", held: [0, 0, 0] }].map(({ interval, held }) => {
      const place = numbers.intervals.indexOf(interval);
      const state = [parameters, gradients[place], optimizerState, buffers[place]];
      const sizes = [...state, ...held.map((size) => size / BYTES_PER_MIB)].map((mib) => mib / MIB_PER_GIB);
      return { sizes, total: sizes.reduce((sum, size) => sum + size, 0) };
    });
    const { sizes, total } = candidates.reduce((fullest, each) => (each.total > fullest.total ? each : fullest));
    return {
      sizes, total, cpu: cpu / MIB_PER_GIB, sent: sent / 1000, sentBetweenNodes: sentBetweenNodes / 1000,
      verdict: total < numbers.fits * choice.memory ? 0 : total < choice.memory ? 1 : 2,
    };
  }

  // 2. Commands

  // Return [flag, variable, value] of the knobs that a command sets
  function knobs(method) {
    const all = [["--model_name", "MODEL_NAME", numbers.model_names[choice.model]]];
    if (choice.model === "custom-gpt" && `custom-gpt ${choice.length}` in numbers.models) {
      all.push(["--seq_length", "SEQ_LENGTH", choice.length]);
    }
    all.push(choice.precision === "bf16" ? ["--bf16", "BF16", "True"] : ["--fp16", "FP16", "False"]);
    all.push(["--max_length", "MAX_LENGTH", choice.length]);
    all.push(["--per_device_train_batch_size", "BATCH_SIZE", choice.batch]);
    all.push(["--gradient_accumulation_steps", "GRAD_ACC", choice.accumulation]);
    if (choice.loss === "chunked") {
      all.push(["--loss", "LOSS", "chunked"]);
    }
    if (isBloom() && choice.attention === "sdpa") {
      all.push(["--attention", "ATTENTION", "sdpa"]);
    }
    if (choice.checkpointing === "yes" && !method.checkpointing) {
      all.push(["--activation_checkpointing", "ACTIVATION_CHECKPOINTING", "True"]);
    }
    return all;
  }

  function formatFlags(method) {
    const words = knobs(method).map(([flag, , value]) => `${flag} ${value}`);
    return [...words, method.config && `${method.flags} ${method.config}`].filter(Boolean).join(NEW_LINE);
  }

  function estimateCommand(method) {
    const hardware = `--gpus ${choice.gpus} --nodes ${nodes()} --gpu_memory ${choice.memory}`;
    return ["python scripts/estimate_memory.py", hardware, formatFlags(method)].join(NEW_LINE);
  }

  function trainingCommand(method) {
    const start = choice.gpus === "1"
      ? "python"
      : `OMP_NUM_THREADS=4 torchrun --nproc_per_node=${choice.gpus}`;
    return nodes() === 1 ? [`${start} scripts/train.py`, formatFlags(method)].join(NEW_LINE) : "";
  }

  // Use the experiment with this layout. If there is none, use another experiment and set its nodes and GPUs
  function experimentCommand(method) {
    const { "one node": oneNode, "several nodes": severalNodes, [layout()]: exact } = method.experiments;
    const other = choice.gpus === "1" ? undefined : nodes() > 1 ? severalNodes ?? oneNode : oneNode ?? severalNodes;
    const script = exact ?? other;
    if (!script) {
      return "";
    }
    const folder = script.slice(0, script.lastIndexOf("/"));
    const variables = knobs(method).map(([, variable, value]) => `${variable}=${value}`);
    const asked = exact ? "" : `--nodes=${nodes()} --gpus-per-node=${choice.gpus / nodes()} `;
    return [`cd ${folder} &&`, ...variables, `sbatch ${asked}${script.slice(folder.length + 1)}`].join(NEW_LINE);
  }

  // Return advice for a method without an experiment
  function copyAdvice(method) {
    const family = method.flags === "--deepspeed" ? "deepspeed-multi-node" : "fsdp-multi-node";
    const flags = `${method.flags} "$ROOT/${method.config}"`;
    return `No experiment starts this method on several nodes. Copy experiments/${family}/2_nodes, set its nodes and GPUs, ` +
      `and write ${flags} into its last line.`;
  }

  // 3. The address

  // Read the choice from the address, with defaults for missing keys, and report unknown keys and values
  function readAddress() {
    if (!location.hash.includes("=")) {
      return; // the anchor of a heading
    }
    choice = { ...DEFAULTS };
    const unknown = [];
    for (const [key, value] of new URLSearchParams(location.hash.slice(1))) {
      const known = Object.hasOwn(POSSIBLE, key);
      if (known && POSSIBLE[key].includes(value)) {
        choice[key] = value;
      } else {
        const instead = known ? `${DEFAULTS[key]} is used instead` : "it is ignored";
        unknown.push(`The address has an unknown choice, ${key}=${value}: ${instead}.`);
      }
    }
    draw(unknown);
  }

  function writeAddress() {
    draw([]);
    history.replaceState(null, "", `#${new URLSearchParams(choice)}`);
  }

  // 4. Drawing

  function element(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      made.setAttribute(name, value);
    }
    made.append(...children);
    return made;
  }

  const gib = (size) => `${size.toFixed(1)} GiB`;
  const gb = (size) => `${size.toFixed(size < 10 ? 2 : 1)} GB`;
  const partName = (part) => (part === "logits" && choice.loss === "chunked" ? "loss" : part);
  const partClass = (part) => `part ${part.replace(" ", "-")}`;

  function makeControls() {
    for (const { key, label } of CONTROLS) {
      const options = POSSIBLE[key].map((value) => element("option", { value }, value));
      const select = element("select", { name: key }, ...options);
      select.addEventListener("change", () => {
        choice[key] = select.value;
        writeAddress();
      });
      document.getElementById("choices").append(element("label", {}, label, select));
    }
  }

  function sentence() {
    const parameters = `${(model().parameters / 1e9).toFixed(2)} billion parameters`;
    const nodesText = nodes() === 1 ? "1 node" : `${nodes()} nodes`;
    const sequences = choice.batch * choice.accumulation * choice.gpus;
    return `${choice.model}: ${parameters}. ${choice.gpus} GPU${choice.gpus === "1" ? "" : "s"} on ${nodesText}, ` +
      `${sequences} sequences in each optimizer step. Predicted, not measured:`;
  }

  function bar(needs, scale) {
    const parts = PARTS.map((part, place) => {
      const width = `width: ${(100 * needs.sizes[place]) / scale}%`;
      return element("span", { class: partClass(part), style: width });
    });
    const line = element("span", { class: "line", style: `left: ${(100 * choice.memory) / scale}%` });
    const cut = needs.total > scale ? " cut" : "";
    return element("span", { class: `bar${cut}`, "aria-hidden": "true" }, ...parts, line);
  }

  function sentWords(needs) {
    if (choice.gpus === "1") {
      return "";
    }
    return `sends ${gb(needs.sent)}` + (nodes() > 1 ? `, ${gb(needs.sentBetweenNodes)} between nodes` : "");
  }

  function methodRow(method, needs, scale) {
    const radio = element("input", { type: "radio", name: "method", value: method.name });
    radio.checked = method.name === choice.method;
    radio.addEventListener("change", () => {
      choice.method = method.name;
      writeAddress();
      document.querySelector(`#methods input[value="${method.name}"]`).focus();
    });
    const facts = [
      element("span", { class: "total" }, gib(needs.total)),
      element("span", { class: "verdict" }, `${SIGNS[needs.verdict]} ${numbers.verdicts[needs.verdict]}`),
      element("span", { class: "sent" }, sentWords(needs)),
      element("span", { class: "cpu" }, method.offload ? `CPU ${gib(needs.cpu)}` : ""),
    ];
    const name = element("span", { class: "name" }, radio, " ", methodLabel(method));
    const attributes = { class: `method verdict-${needs.verdict}`, "data-method": method.name };
    return element("label", attributes, name, ...facts, bar(needs, scale));
  }

  function copyButton(text) {
    const button = element("button", { type: "button" }, "Copy");
    button.addEventListener("click", async () => {
      try {
        await navigator.clipboard.writeText(text);
        button.textContent = "Copied";
      } catch { // without https the clipboard is not available, so select the text
        getSelection().selectAllChildren(button.previousSibling);
      }
    });
    return button;
  }

  function command(what, text) {
    return text ? [element("p", {}, what), element("div", { class: "command" }, element("pre", {}, text), copyButton(text))] : [];
  }

  function chosenMethod(method, needs) {
    const rows = PARTS.map((part, place) => [partName(part), gib(needs.sizes[place])]);
    rows.push(["in all, on each GPU", gib(needs.total)]);
    rows.push(["CPU memory of a node", gib(needs.cpu)]);
    if (choice.gpus !== "1") {
      rows.push(["sent by a GPU in each step", gb(needs.sent)]);
    }
    if (nodes() > 1) {
      rows.push(["of these between nodes", gb(needs.sentBetweenNodes)]);
    }
    const cells = rows.map(([what, size]) => element("tr", {}, element("th", { scope: "row" }, what), element("td", {}, size)));
    const jobCommand = experimentCommand(method);
    const several = nodes() > 1 && !jobCommand;
    return [
      element("h3", {}, methodLabel(method), method.config ? ` (${method.config})` : " (no config file)"),
      element("table", {}, element("tbody", {}, ...cells)),
      ...command("The same estimate on the command line, which also prints the --mem for sbatch:", estimateCommand(method)),
      ...command("The training, on a node with these GPUs:", trainingCommand(method)),
      ...command("The same training as a Slurm job; add the --mem= of the estimate after sbatch:", jobCommand),
      ...(several ? [element("p", {}, copyAdvice(method))] : []),
    ];
  }

  // messages: sentences about the choice
  function draw(messages) {
    for (const select of document.querySelectorAll("#choices select")) {
      select.value = choice[select.name];
    }
    const attention = document.querySelector('#choices select[name="attention"]');
    attention.disabled = !isBloom();
    if (!isBloom()) {
      attention.value = "sdpa";
    }
    document.getElementById("summary").textContent = sentence();
    const legend = PARTS.map((part) => element("li", {}, element("span", { class: partClass(part) }), partName(part)));
    legend.push(element("li", {}, element("span", { class: "line" }), `the ${choice.memory} GiB of a GPU`));
    document.getElementById("legend").replaceChildren(...legend);

    const possible = numbers.methods.map((method) => [method, computeNeeds(method)]).filter(([, needs]) => needs);
    if (!possible.some(([method]) => method.name === choice.method)) {
      messages.push(`${choice.method} cannot be used here: ${possible[0][0].name} is chosen.`);
      choice.method = possible[0][0].name;
    }
    document.getElementById("message").textContent = messages.join(" ");
    // Cut the scale at 2.5 times the GPU's memory. Otherwise one very large bar would make the small ones invisible
    const largest = Math.max(...possible.map(([, needs]) => needs.total));
    const scale = Math.max(1.15 * choice.memory, Math.min(largest, 2.5 * choice.memory));
    const rows = possible.map(([method, needs]) => methodRow(method, needs, scale));
    document.getElementById("methods").replaceChildren(...rows);

    const reasons = Object.entries(numbers.left_out[layout()]).map(([name, why]) => `${name} (${why})`);
    document.getElementById("left-out").textContent = reasons.length ? `Left out here: ${reasons.join("; ")}.` : "";
    const [chosen, needs] = possible.find(([method]) => method.name === choice.method);
    document.getElementById("chosen").replaceChildren(...chosenMethod(chosen, needs));
  }

  makeControls();
  window.addEventListener("hashchange", readAddress);
  document.getElementById("what-fits").hidden = false;
  draw([]);
  readAddress();
})();
