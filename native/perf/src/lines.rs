//! JSON, one value a line: how processes ask this program, and how its own two ends talk.

use std::io::{self, BufRead, Write};

use serde::{de::DeserializeOwned, Serialize};

/// Why a request could not be measured, as a sentence.
pub type TextResult<T> = Result<T, String>;

pub fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Answers each request of stdin on stdout, or `{"error": "..."}`, until stdin closes.
pub fn serve<Request: DeserializeOwned, Reply: Serialize>(
    measure: impl FnMut(&Request) -> TextResult<Reply>,
) -> TextResult<()> {
    answer(io::stdin().lock(), io::stdout().lock(), measure)
}

pub fn answer<Request: DeserializeOwned, Reply: Serialize>(
    requests: impl BufRead,
    mut replies: impl Write,
    mut measure: impl FnMut(&Request) -> TextResult<Reply>,
) -> TextResult<()> {
    for line in requests.lines() {
        let line = line.map_err(text)?;
        if line.trim().is_empty() {
            continue;
        }
        let reply = serde_json::from_str(&line)
            .map_err(|e| format!("the request is not understood: {e}"))
            .and_then(|request| measure(&request));
        match reply {
            Ok(reply) => write_line(&mut replies, &reply)?,
            Err(error) => write_line(&mut replies, &serde_json::json!({ "error": error }))?,
        }
    }
    Ok(())
}

pub fn write_line(to: &mut impl Write, value: &impl Serialize) -> TextResult<()> {
    writeln!(to, "{}", serde_json::to_string(value).map_err(text)?).map_err(text)?;
    to.flush().map_err(text)
}

pub fn read_line<T: DeserializeOwned>(from: &mut impl BufRead) -> TextResult<T> {
    let mut line = String::new();
    if from.read_line(&mut line).map_err(text)? == 0 {
        return Err("the target has ended; its last words are on stderr".into());
    }
    serde_json::from_str(&line).map_err(text)
}
