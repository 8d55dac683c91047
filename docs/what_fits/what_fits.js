// The interactive part "What fits where", on the site's first page (compact) and on docs/what-fits.html. All numbers come
// from numbers.json, which compute.py computes with the code of the estimates. This script adds them for each interval of
// a step, compares the sum with the GPU's memory, and draws bars.
(() => {
  const numbers = window.WHAT_FITS_NUMBERS;
  const root = document.getElementById("what-fits");
  const isCompact = root.classList.contains("compact");
  const BYTES_PER_MIB = 2 ** 20;
  const MIB_PER_GIB = 2 ** 10;
  const NEW_LINE = " \\\n  "; // continues a shell command on the next line

  // key: the name in numbers.choices and in the page's address. compact: the first page has this control
  const CONTROLS = [
    { key: "model", label: "Model", compact: true },
    { key: "gpus", label: "GPUs", compact: true },
    { key: "per_node", label: "GPUs of a node" },
    { key: "memory", label: "GiB of a GPU", compact: true },
    { key: "batch", label: "Micro batch", compact: true },
    { key: "length", label: "Tokens of a sequence" },
    { key: "accumulation", label: "Accumulation" },
    { key: "precision", label: "Precision" },
    { key: "loss", label: "Loss" },
    { key: "attention", label: "Attention (BLOOM)" },
    { key: "checkpointing", label: "Activation checkpointing" },
  ];
  const DEFAULTS = {
    model: "bloom-7b1", length: "512", batch: "1", accumulation: "4", precision: "bf16", loss: "full",
    attention: "eager", checkpointing: "no", gpus: "4", per_node: "4", memory: "40", order: "method", method: "zero3",
  };
  const POSSIBLE = {
    ...Object.fromEntries(Object.entries(numbers.choices).map(([key, values]) => [key, values.map(String)])),
    checkpointing: ["no", "yes"],
    order: ["method", "fits"],
    method: numbers.methods.map((method) => method.name),
  };
  const ORDERS = ["by method", "by what fits"]; // one for each of POSSIBLE.order
  const SIGNS = ["✓", "≈", "✗"]; // one for each of numbers.verdicts
  const PARTS = ["parameters", "gradients", "optimizer state", "buffers", "activations", "logits", "head"];
  // Columns after the method's name. On a narrow screen each number is followed by its unit
  const COLUMNS = [
    { key: "total", unit: "GiB on a GPU", compact: true },
    { key: "verdict", head: "Fits?", compact: true },
    { key: "sent", unit: "GB sent per step" },
    { key: "cpu", unit: "GiB of CPU memory per node" },
  ].filter((column) => column.compact || !isCompact);
  const MARKED = 5000; // milliseconds for which a changed control is marked

  let choice = { ...DEFAULTS };

  // 1. Memory and messages of a method

  const isBloom = () => choice.model.startsWith("bloom");
  // The custom GPT with more positions has more parameters
  const model = () => numbers.models[`${choice.model} ${choice.length}`] ?? numbers.models[choice.model];
  const nodes = () => Math.max(1, Math.floor(choice.gpus / choice.per_node));
  const layout = () => `${nodes()}x${choice.gpus / nodes()}`;

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

  // 3. Rows: groups of methods with equal numbers

  const METHODS = Object.values(numbers.groups).flatMap((group) => Object.keys(group)) // in the order of the page
    .map((name) => numbers.methods.find((method) => method.name === name));
  const isPlain = (method) => method.name === "DDP" && choice.gpus === "1";
  const groupOf = (method) => Object.keys(numbers.groups).find((group) => method.name in numbers.groups[group]);
  const title = (method) => (isPlain(method) ? "Plain Trainer" : numbers.groups[groupOf(method)][method.name]);
  const fileName = (method) => (method.config ? method.name : isPlain(method) ? "plain" : "");

  const gib = (size) => size.toFixed(1);
  const isShown = (size) => Number(gib(size)) > 0; // a part of 0.0 GiB is left out
  const gb = (size) => size.toFixed(size > 0 && size < 10 ? 2 : 1);

  // Return the text of each column
  function rowTexts(needs) {
    const verdict = `${SIGNS[needs.verdict]} ${numbers.verdicts[needs.verdict]}`;
    return { total: gib(needs.total), verdict, sent: gb(needs.sent), cpu: gib(needs.cpu) };
  }

  // Fold methods of a group into one row if a reader would see the same numbers and the same bar
  function foldEqual(possible) {
    const rows = new Map();
    for (const { method, needs } of possible) {
      const texts = rowTexts(needs);
      const shown = [...COLUMNS.map(({ key }) => texts[key]), gb(needs.sentBetweenNodes), ...needs.sizes.map(gib)];
      const key = [groupOf(method), ...shown].join();
      const row = rows.get(key) ?? { group: groupOf(method), needs, texts, methods: [] };
      row.methods.push(method);
      rows.set(key, row);
    }
    return [...rows.values()];
  }

  // Sort rows with the same verdict in the order in which to try their methods
  const placeToTry = ({ methods }) => numbers.order_to_try.indexOf(methods[0].name);

  // Return pairs of a heading and its rows
  function groupRows(possible) {
    const rows = foldEqual(possible);
    const groups = choice.order === "method"
      ? Object.keys(numbers.groups).map((group) => [group, rows.filter((row) => row.group === group)])
      : numbers.verdicts.map((verdict, place) => [
        verdict[0].toUpperCase() + verdict.slice(1),
        rows.filter(({ needs }) => needs.verdict === place).sort((one, other) => placeToTry(one) - placeToTry(other)),
      ]);
    return groups.filter(([, found]) => found.length);
  }

  // 4. The address

  // Return the choice in the address, with defaults for missing keys, and sentences about unknown keys and values.
  // Return null if the address has no choice, but perhaps the anchor of a heading
  function readAddress() {
    if (!location.hash.includes("=")) {
      return null;
    }
    const asked = { ...DEFAULTS };
    const unknown = [];
    for (const [key, value] of new URLSearchParams(location.hash.slice(1))) {
      const known = Object.hasOwn(POSSIBLE, key);
      if (known && POSSIBLE[key].includes(value)) {
        asked[key] = value;
      } else {
        const instead = known ? `${DEFAULTS[key]} is used instead` : "it is ignored";
        unknown.push(`The address has an unknown choice, ${key}=${value}: ${instead}.`);
      }
    }
    return { asked, unknown };
  }

  const formatAddress = (changes = {}) => `#${new URLSearchParams({ ...choice, ...changes })}`;

  function writeAddress() {
    draw([]);
    history.replaceState(null, "", formatAddress());
  }

  // Show the choice of a link that was followed on this page, and mark the controls that it changed
  function followAddress() {
    const read = readAddress();
    if (!read) {
      return;
    }
    const before = choice;
    choice = read.asked;
    const changed = CONTROLS.filter(({ key }) => choice[key] !== before[key]);
    const words = changed.map(({ key, label }) => `${label} ${before[key]} → ${choice[key]}`);
    draw([...read.unknown, words.length ? `Changed: ${words.join(", ")}.` : "The controls had this choice already."]);
    changed.forEach(({ key }) => markControl(key));
    root.scrollIntoView();
  }

  // 5. Drawing

  const place = (id) => document.getElementById(id);
  const control = (key) => root.querySelector(`select[name="${key}"]`);

  function element(tag, attributes, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      made.setAttribute(name, value);
    }
    made.append(...children);
    return made;
  }

  const partName = (part) => (part === "logits" && choice.loss === "chunked" ? "logits of a chunk" : part);
  const partClass = (part) => `part ${part.replace(" ", "-")}`;

  // texts: the words for the possible values
  function makeControl(key, label, texts = POSSIBLE[key]) {
    const options = POSSIBLE[key].map((value, index) => element("option", { value }, texts[index]));
    const select = element("select", { name: key }, ...options);
    select.addEventListener("change", () => {
      choice[key] = select.value;
      writeAddress();
    });
    return element("label", {}, element("span", {}, label), select);
  }

  function makeControls() {
    const shown = CONTROLS.filter(({ compact }) => compact || !isCompact);
    place("choices").append(...shown.map(({ key, label }) => makeControl(key, label)));
    place("order")?.append(makeControl("order", "Sorted", ORDERS));
  }

  function markControl(key) {
    const label = control(key)?.parentElement;
    label?.classList.add("changed");
    setTimeout(() => label?.classList.remove("changed"), MARKED);
  }

  function sentence() {
    const parameters = `${(model().parameters / 1e9).toFixed(2)} billion parameters`;
    const nodesText = nodes() === 1 ? "1 node" : `${nodes()} nodes`;
    const sequences = choice.batch * choice.accumulation * choice.gpus;
    const attention = isBloom() ? `, ${choice.attention} attention` : "";
    const checkpointing = choice.checkpointing === "yes" ? ", activation checkpointing" : "";
    const settings = `${choice.length} tokens, accumulation ${choice.accumulation}, ${choice.precision}, ` +
      `${choice.loss} loss${attention}${checkpointing}. `;
    return `${choice.model}: ${parameters}. ${choice.gpus} GPU${choice.gpus === "1" ? "" : "s"} on ${nodesText}, ` +
      `${sequences} sequences in each optimizer step. ${isCompact ? settings : ""}Predicted, not measured:`;
  }

  // possible: the methods of the list. The legend leaves out the parts that no bar shows
  function legend(possible) {
    const shown = PARTS.filter((part, index) => possible.some(({ needs }) => isShown(needs.sizes[index])));
    const parts = shown.map((part) => element("li", {}, element("span", { class: partClass(part) }), partName(part)));
    return [...parts, element("li", {}, element("span", { class: "limit" }), `the ${choice.memory} GiB of a GPU`)];
  }

  // scale: GiB that are as wide as the bar's cell
  function bar(needs, scale) {
    const parts = PARTS.map((part, index) => {
      const width = `width: ${(100 * needs.sizes[index]) / scale}%`;
      return element("span", { class: partClass(part), style: width });
    });
    return element("td", { class: needs.total > scale ? "bar cut" : "bar", "aria-hidden": "true" }, ...parts);
  }

  // On the first page, a method is a link to its details. On the other page, it is a radio button that shows them below
  function member(method, texts) {
    const name = element("span", {}, title(method));
    const attributes = { class: "member", "data-method": method.name };
    if (isCompact) {
      const href = place("more").getAttribute("href").split("#")[0] + formatAddress({ method: method.name });
      return element("a", { ...attributes, href }, name);
    }
    const label = `${title(method)}: ${texts.total} GiB, ${numbers.verdicts[SIGNS.indexOf(texts.verdict[0])]}`;
    const radio = element("input", { type: "radio", name: "method", value: method.name, "aria-label": label });
    radio.checked = method.name === choice.method;
    radio.addEventListener("change", () => {
      choice.method = method.name;
      writeAddress();
      root.querySelector("#methods input:checked").focus();
    });
    return element("label", attributes, radio, name, " ", element("small", {}, fileName(method)));
  }

  function methodRow({ methods, needs, texts }, scale) {
    const cells = COLUMNS.map(({ key, unit }) =>
      element("td", { class: key, ...(unit && { "data-unit": unit }) }, texts[key]));
    if (nodes() > 1) {
      const between = element("small", {}, ` ${gb(needs.sentBetweenNodes)} between nodes`);
      cells.find((cell) => cell.className === "sent")?.append(between);
    }
    const name = element("th", { class: "name", scope: "row" }, ...methods.map((method) => member(method, texts)));
    return element("tr", { class: `method verdict-${needs.verdict}` }, name, ...cells, bar(needs, scale));
  }

  function methodTable(possible) {
    // Cut the scale at 2.5 times the GPU's memory. Otherwise one very large bar would make the small ones invisible
    const largest = Math.max(...possible.map(({ needs }) => needs.total));
    const scale = Math.max(1.15 * choice.memory, Math.min(largest, 2.5 * choice.memory));
    place("methods").style.setProperty("--gpu", `${(100 * choice.memory) / scale}%`);
    const heads = COLUMNS.map(({ key, head, unit }) => element("th", { class: key, scope: "col" }, head ?? unit));
    const head = element("tr", {}, element("th", { class: "name", scope: "col" }, "Method"), ...heads);
    const groups = groupRows(possible).map(([heading, rows]) => {
      const first = element("th", { scope: "rowgroup", colspan: COLUMNS.length + 2 }, heading);
      return element("tbody", {}, element("tr", { class: "group" }, first), ...rows.map((row) => methodRow(row, scale)));
    });
    return [element("thead", {}, head), ...groups];
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

  function chosenMethod({ method, needs }) {
    const rows = PARTS.map((part, index) => [partName(part), needs.sizes[index]])
      .filter(([, size]) => isShown(size)).map(([part, size]) => [part, `${gib(size)} GiB`]);
    rows.push(["in all, on each GPU", `${gib(needs.total)} GiB`]);
    rows.push(["CPU memory of a node", `${gib(needs.cpu)} GiB`]);
    if (choice.gpus !== "1") {
      rows.push(["sent by a GPU in each step", `${gb(needs.sent)} GB`]);
    }
    if (nodes() > 1) {
      rows.push(["of these between nodes", `${gb(needs.sentBetweenNodes)} GB`]);
    }
    const cells = rows.map(([what, size]) => element("tr", {}, element("th", { scope: "row" }, what), element("td", {}, size)));
    const jobCommand = experimentCommand(method);
    const several = nodes() > 1 && !jobCommand;
    return [
      element("h3", {}, title(method), method.config ? ` (${method.config})` : " (no config file)"),
      element("table", {}, element("tbody", {}, ...cells)),
      ...command("The same estimate on the command line, which also prints the --mem for sbatch:", estimateCommand(method)),
      ...command("The training, on a node with these GPUs:", trainingCommand(method)),
      ...command("The same training as a Slurm job; add the --mem= of the estimate after sbatch:", jobCommand),
      ...(several ? [element("p", {}, copyAdvice(method))] : []),
    ];
  }

  // messages: sentences about the choice
  function draw(messages) {
    for (const select of root.querySelectorAll("select")) {
      select.value = choice[select.name];
    }
    if (!isCompact) {
      control("attention").disabled = !isBloom();
      control("attention").value = isBloom() ? choice.attention : "sdpa";
    }
    place("summary").textContent = sentence();
    const possible = METHODS.map((method) => ({ method, needs: computeNeeds(method) })).filter(({ needs }) => needs);
    place("legend").replaceChildren(...legend(possible));
    if (!possible.some(({ method }) => method.name === choice.method)) {
      const chosen = METHODS.find(({ name }) => name === choice.method);
      const first = possible[0].method;
      messages.push(`${title(chosen)} cannot be used here: ${title(first)} is chosen.`);
      choice.method = first.name;
    }
    place("message").textContent = messages.join(" ");
    place("methods").replaceChildren(...methodTable(possible));

    const impossible = METHODS.filter(({ name }) => name in numbers.left_out[layout()]);
    const reasons = impossible.map((method) => `${title(method)} (${method.name}: ${numbers.left_out[layout()][method.name]})`);
    place("left-out").textContent = reasons.length ? `Left out here: ${reasons.join("; ")}.` : "";
    if (isCompact) {
      place("more").hash = formatAddress();
    } else {
      place("chosen").replaceChildren(...chosenMethod(possible.find(({ method }) => method.name === choice.method)));
    }
  }

  makeControls();
  root.hidden = false;
  const { asked = choice, unknown = [] } = readAddress() ?? {};
  choice = asked;
  draw(unknown);
  window.addEventListener("hashchange", followAddress);
  // A second click on the same link does not change the address, but must show the controls again
  document.addEventListener("click", ({ target }) => {
    if (target.closest("a")?.href === location.href) {
      followAddress();
    }
  });
})();
