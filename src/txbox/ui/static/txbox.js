// What scripts add to pages that work without them: the theme, times in words, choosing rows, and pages that stay fresh.
"use strict";
(() => {
  const root = document.documentElement;
  const themes = ["system", "light", "dark"];
  const stored = () => { try { return localStorage.getItem("txbox-theme") || "system"; } catch { return "system"; } };
  const wear = (theme) => { if (theme === "system") delete root.dataset.theme; else root.dataset.theme = theme; };
  wear(stored());

  const unit = [["d", 86400], ["h", 3600], ["m", 60], ["s", 1]];
  const age = (s) => {
    let left = Math.floor(Math.abs(s)); const parts = [];
    for (const [name, size] of unit) { const n = Math.floor(left / size); left -= n * size; if (n || parts.length) parts.push(n ? n + name : ""); if (parts.length === 2) break; }
    return parts.filter(Boolean).join(" ") || "0s";
  };
  // how long ago; where times are compared, behind the time itself. The title has it in UTC and as it is here
  const tell = (within) => within.querySelectorAll("time[datetime]").forEach((time) => {
    const at = new Date(time.dateTime), s = (Date.now() - at) / 1000, words = s < 0 ? "in " + age(s) : age(s) + " ago";
    const utc = time.dataset.utc ||= time.textContent;
    time.textContent = time.closest(".at, th, p") ? `${utc} (${words})` : words;
    time.title = `${utc}, here ${at.toLocaleString()}`;
  });

  const choosing = () => document.querySelectorAll("form.rows").forEach((form) => {
    const boxes = [...form.querySelectorAll("input[name=pick]")], head = form.querySelector("thead .pick");
    const buttons = [...form.querySelectorAll("button[value$=' selected']")];
    const count = () => {
      const n = boxes.filter((box) => box.checked).length;
      buttons.forEach((button) => { button.disabled = !n; button.textContent = button.textContent.replace(/ (selected|\d+)…$/, n ? ` ${n}…` : " selected…"); });
      const all = head && head.querySelector("input"); if (all) { all.checked = n > 0 && n === boxes.length; all.indeterminate = n > 0 && n < boxes.length; }
    };
    if (head && boxes.length && !head.querySelector("input")) {
      const all = document.createElement("input"); all.type = "checkbox"; all.setAttribute("aria-label", "Choose all on this page");
      all.addEventListener("change", () => { boxes.forEach((box) => { box.checked = all.checked; }); count(); });
      head.replaceChildren(all);
    }
    let last = null;
    boxes.forEach((box, index) => box.addEventListener("click", (event) => {
      if (event.shiftKey && last !== null) boxes.slice(Math.min(last, index), Math.max(last, index) + 1).forEach((other) => { other.checked = box.checked; });
      last = index; count();
    }));
    count();
  });

  // a page is asked for again and its regions are put in place, unless somebody is choosing or typing there
  let asking = false;
  const fresh = async () => {
    if (asking || document.hidden) return;
    asking = true;
    try {
      const answer = await fetch(location.href, { headers: { accept: "text/html" }, credentials: "same-origin" });
      if (!answer.ok) return;
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      document.querySelectorAll("[data-region]").forEach((region) => {
        const next = page.querySelector(`[data-region="${region.dataset.region}"]`);
        if (!next || region.contains(document.activeElement) && document.activeElement !== region) return;
        if (region.querySelector("input:checked, details[open]")) return;
        if ([...region.querySelectorAll("input:not([type=hidden])")].some((field) => field.value !== field.defaultValue)) return;
        if (next.innerHTML !== region.innerHTML) { region.replaceChildren(...next.childNodes); tell(region); }
      });
      choosing();
      if (!page.body.dataset.live) { const stream = root.stream; if (stream) stream.close(); }
    } catch { /* the next event asks again */ } finally { asking = false; }
  };

  document.addEventListener("DOMContentLoaded", () => {
    tell(document);
    setInterval(() => tell(document), 10000);
    choosing();
    const toggle = document.querySelector("[data-theme-toggle]");
    if (toggle) {
      const say = () => { toggle.textContent = "Theme: " + stored(); };
      toggle.hidden = false; say();
      toggle.addEventListener("click", () => {
        const next = themes[(themes.indexOf(stored()) + 1) % themes.length];
        try { localStorage.setItem("txbox-theme", next); } catch { /* it lasts for this page */ }
        wear(next); say();
      });
    }
    const live = document.body.dataset.live;
    if (live && "EventSource" in window) {
      const stream = root.stream = new EventSource(live);
      stream.addEventListener("changed", fresh);
      window.addEventListener("pagehide", () => stream.close());
      document.addEventListener("visibilitychange", () => { if (!document.hidden) fresh(); });
    }
    // / to the first filter, g and a letter to a page
    let went = 0;
    const pages = { o: "/", m: "/messages", f: "/failures", q: "/quarantine", x: "/outbox", w: "/workers", d: "/database", a: "/audit" };
    document.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
      if (event.key === "/") { const first = document.querySelector(".filters input, .filters select"); if (first) { event.preventDefault(); first.focus(); } }
      else if (event.key === "g") went = Date.now();
      else if (pages[event.key] && Date.now() - went < 1000) {
        const brand = document.querySelector(".brand"); if (!brand) return;
        const link = document.querySelector(`.side a[href="${brand.getAttribute("href").replace(/\/$/, "") + pages[event.key]}"]`);
        if (link) link.click();
      }
    });
  });
})();
