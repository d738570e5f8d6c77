//! Functions that the device provides to kernels.

use super::fixture::{A, CTX, Fixture, word};
use super::kernels::{launch, load};
use kedge_cuda_types::CuError;
use kedge_protocol::{OutputTarget, StreamOp};

/// A call of device function `name` in PTX: (type, argument)s by value, and the result's type.
fn call(name: &str, arguments: &[(&str, &str)], result: Option<(&str, &str)>) -> String {
    let mut text = "{\n".to_owned();
    let mut list = Vec::new();
    for (index, (ty, value)) in arguments.iter().enumerate() {
        text += &format!(".param .{ty} p{index};\nst.param.{ty} [p{index}], {value};\n");
        list.push(format!("p{index}"));
    }
    let list = list.join(", ");
    match result {
        Some((ty, register)) => {
            text += &format!(".param .{ty} r;\ncall.uni (r), {name}, ({list});\n");
            text += &format!("ld.param.{ty} {register}, [r];\n}}\n");
        }
        None => text += &format!("call.uni {name}, ({list});\n}}\n"),
    }
    text
}

/// A NUL-terminated string as a module variable.
fn string(name: &str, text: &str) -> String {
    let bytes: Vec<String> = text.bytes().chain([0]).map(|byte| byte.to_string()).collect();
    format!(".global .align 1 .b8 {name}[{}] = {{{}}};\n", bytes.len(), bytes.join(", "))
}

#[test]
fn printf_and_assert_reach_the_host() {
    let assert = [("b64", "%rd1"), ("b64", "%rd2"), ("b32", "42"), ("b64", "%rd3"), ("b64", "1")];
    let text = [
        ".extern .func (.param .b32 r) vprintf(.param .b64 f, .param .b64 a);\n".to_owned(),
        ".extern .func __assertfail(.param .b64 m, .param .b64 f, .param .b32 l, .param .b64 n, \
         .param .b64 c);\n"
            .to_owned(),
        string("format", "%d of %s\n"),
        string("message", "x > 0"),
        string("file", "a.cu"),
        string("name", "void k()"),
        "
.visible .entry k(.param .u32 unused)
{
    .local .align 8 .b8 args[16];
    .reg .b32 %r<3>;
    .reg .b64 %rd<6>;
    mov.u32 %r1, %tid.x;
    mov.u64 %rd1, file;
    cvta.global.u64 %rd1, %rd1;
    st.local.u32 [args], %r1;
    st.local.u64 [args+8], %rd1;
    mov.u64 %rd4, format;
    cvta.global.u64 %rd4, %rd4;
    mov.u64 %rd5, args;
    cvta.local.u64 %rd5, %rd5;
"
        .to_owned(),
        call("vprintf", &[("b64", "%rd4"), ("b64", "%rd5")], Some(("b32", "%r2"))),
        "mov.u64 %rd1, message;\nmov.u64 %rd2, file;\nmov.u64 %rd3, name;\n".to_owned(),
        call("__assertfail", &assert, None),
        "ret;\n}\n".to_owned(),
    ]
    .concat();
    let f = Fixture::new();
    let info = load(&f, &[&text]);
    f.submit(A, launch(&info, "k", 1, 2, vec![0; 4]));
    assert_eq!(f.sync(A), Err(CuError::ASSERT));
    let failed = |thread| {
        format!(
            "a.cu:42: void k(): block: [0,0,0], thread: [{thread},0,0] Assertion `x > 0` failed.\n"
        )
    };
    let expected = [
        (OutputTarget::Stdout {}, "0 of a.cu\n".to_owned()),
        (OutputTarget::Stdout {}, "1 of a.cu\n".to_owned()),
        (OutputTarget::Stderr {}, failed(0)),
        (OutputTarget::Stderr {}, failed(1)),
    ];
    assert_eq!(*f.host.printed.lock().unwrap(), expected);
    assert_eq!(*f.host.faults.lock().unwrap(), [(CTX, CuError::ASSERT)]);
}

/// Tail launches run after the others, in their order: only that gives the right number.
#[test]
fn a_grid_is_over_after_the_grids_that_it_launches() {
    let get = |kernel: &str| {
        format!(
            "mov.u64 %rd2, {kernel};
{{
.param .b64 p0;
st.param.b64 [p0], %rd2;
.param .align 4 .b8 p1[12];
st.param.b32 [p1+0], 1;
st.param.b32 [p1+4], 1;
st.param.b32 [p1+8], 1;
.param .align 4 .b8 p2[12];
st.param.b32 [p2+0], 1;
st.param.b32 [p2+4], 1;
st.param.b32 [p2+8], 1;
.param .b32 p3;
st.param.b32 [p3], 0;
.param .b64 r;
call.uni (r), __cudaCDP2GetParameterBufferV2, (p0, p1, p2, p3);
ld.param.b64 %rd3, [r];
}}
st.u64 [%rd3], %rd1;
"
        )
    };
    let start = |kernel: &str, stream: &str| {
        let arguments = [("b64", "%rd3"), ("b64", stream)];
        get(kernel) + &call("__cudaCDP2LaunchDeviceV2", &arguments, Some(("b32", "%r1")))
    };
    let kernel = |name: &str, body: &str| {
        format!(
            ".visible .entry {name}(.param .u64 at)
{{
    .reg .b32 %r<3>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [at];
{body}
    ret;
}}
"
        )
    };
    let update = |op: &str| {
        format!("ld.global.u32 %r1, [%rd1];\n{op} %r1, %r1, 2;\nst.global.u32 [%rd1], %r1;\n")
    };
    let text = [
        ".extern .func (.param .b64 r) __cudaCDP2GetParameterBufferV2(.param .b64 f, \
         .param .align 4 .b8 g[12], .param .align 4 .b8 b[12], .param .b32 s);\n"
            .to_owned(),
        ".extern .func (.param .b32 r) __cudaCDP2LaunchDeviceV2(.param .b64 b, .param .b64 s);\n"
            .to_owned(),
        kernel("add", &update("add.u32")),
        kernel("triple", &update("mad.lo.u32").replace("%r1, 2;", "%r1, 2, %r1;")),
        kernel(
            "parent",
            &[start("triple", "3"), start("add", "3"), start("add", "0"), start("add", "0")]
                .concat(),
        ),
    ]
    .concat();
    let f = Fixture::new();
    let word_at = f.alloc(0, 4096);
    let clear =
        StreamOp::Memset { dst: word_at, pitch: 0, value: 0, element: 4, width: 1, height: 1 };
    let info = load(&f, &[&text]);
    let params = word_at.to_le_bytes().to_vec();
    for _ in 0..20 {
        f.submit(A, clear.clone());
        f.submit(A, launch(&info, "parent", 1, 1, params.clone()));
        f.submit(A, launch(&info, "add", 1, 1, params.clone()));
        assert_eq!(f.sync(A), Ok(()), "{:?}", f.host.log.lock().unwrap());
        // Two adds of 2, then three times that, then a tail's 2; then the host's own 2.
        assert_eq!(word(word_at), (2 + 2) * 3 + 2 + 2);
    }
}
