// The page's frame: tabs, the key, and how the server is.

import { get, hasKey, useKey } from "./api.js";
import { announce, byId } from "./dom.js";
import { startWatching, watching } from "./watch.js";
import { serve, startWriting } from "./write.js";

const HEALTH_SECONDS = 5,
  LOADING_SECONDS = 1;
const tabs = [byId("tab-write"), byId("tab-watch")];

function choose(tab, focus = false) {
  for (const one of tabs) {
    const is = one === tab;
    one.setAttribute("aria-selected", is);
    one.tabIndex = is ? 0 : -1;
    byId(one.getAttribute("aria-controls")).hidden = !is;
  }
  if (focus) tab.focus();
  history.replaceState(null, "", `#${tab.getAttribute("aria-controls")}`);
  watching(tab === tabs[1]);
}

for (const tab of tabs) {
  tab.addEventListener("click", () => choose(tab));
  tab.addEventListener("keydown", (event) => {
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") choose(tabs[1 - tabs.indexOf(tab)], true);
  });
}

// -- the key ---------------------------------------------------------------------------------------------------------

const keyForm = byId("key-form");

function askForKey(message = "") {
  keyForm.hidden = false;
  byId("key-error").textContent = message;
  byId("key").focus();
}

keyForm.addEventListener("submit", async (event) => {
  event.preventDefault();
  useKey(byId("key").value.trim());
  try {
    const models = await get("v1/models");
    nameModel(models);
    keyForm.hidden = true;
    byId("key").value = "";
    announce("The key is accepted.");
    byId("prompt").focus();
  } catch (error) {
    useKey("");
    askForKey(error.message);
  }
});

function nameModel(models) {
  byId("model").textContent = models.data
    .map((model) => model.id)
    .slice(0, 1)
    .join("");
}

// -- how the server is -----------------------------------------------------------------------------------------------

async function look() {
  let state = "gone",
    text = "the server cannot be reached",
    pause = HEALTH_SECONDS;
  try {
    const health = await get("health", { any: true });
    state = health.status === "ok" ? "ready" : health.status;
    const { speculation } = health;
    if (speculation) serve(speculation.num_speculative_tokens);
    const drafts = speculation?.enabled ? `speculating, k = ${speculation.num_speculative_tokens}` : "not speculating";
    text = state === "ready" ? `ready, ${drafts}` : state;
    if (state === "loading") pause = LOADING_SECONDS;
  } catch {
    // said by the state
  }
  const shown = byId("state");
  if (shown.dataset.state !== state && shown.dataset.state !== "unknown") announce(`The server: ${text}.`);
  shown.dataset.state = state;
  shown.textContent = text;
  setTimeout(
    () => (document.hidden ? document.addEventListener("visibilitychange", look, { once: true }) : look()),
    pause * 1000,
  );
}

startWriting({ onUnauthorized: askForKey });
startWatching({ onUnauthorized: askForKey });
choose(location.hash === "#watch" ? tabs[1] : tabs[0]);
look();
if (document.documentElement.dataset.keys === "yes" && !hasKey()) askForKey();
else get("v1/models").then(nameModel, () => {});
